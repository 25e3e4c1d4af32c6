// Choosing body slots by their sign codes (docs/self_index.md, "Scan" and "Choice"). Everything up to the scores is done in an order
// that every instruction set and the oracle keep, so that all of them choose the same slots from the same numbers.
#pragma once
#include "cpu/attend.h"
#include "cpu/choose.h"
#include "cpu/packed_queries.h"
#include "cpu/ranking.h"

namespace {

using edgekv::Retrieval;

constexpr int kTableLevels = 63;    // four entries add up in a byte
constexpr int kScanAhead = 8192;   // bytes
constexpr int kBiasLimit = 16383;  // a score of at most 256 entries and a bias fits 16 bits

// The table [dim/4][16] of one transformed query, and the size of its steps.
inline float score_table(const float* query, const float* codebook, int dim, float* exact, uint8_t* table) {
  const int groups = dim / 4;
  float widest = 0;
  for (int g = 0; g < groups; ++g) {
    const float *q = query + 4 * g, *c = codebook + int64_t(g) * 64;
    float* row = exact + 16 * g;
    float least = 0;
    for (int code = 0; code < 16; ++code, c += 4) {
      row[code] = (q[0] * c[0] + q[1] * c[1]) + (q[2] * c[2] + q[3] * c[3]);
      least = code == 0 || row[code] < least ? row[code] : least;
    }
    for (int code = 0; code < 16; ++code) {
      row[code] -= least;
      widest = row[code] > widest ? row[code] : widest;
    }
  }
  const float step = widest > 0 ? widest / kTableLevels : 1.0f;
  for (int i = 0; i < 16 * groups; ++i) {
    const float level = exact[i] / step + 0.5f;
    table[i] = uint8_t(level > 0 ? level < kTableLevels ? level : float(kTableLevels) : 0.0f);  // NaN becomes 0
  }
  return step;
}

// What the mean keys of the intervals from `first` on add to a score, in steps, relative to the newest one.
inline void interval_biases(const PackedBody& b, const float* query, int first, float step, int32_t* bias) {
  alignas(64) float newest[1024];
  auto at = [&](int interval, int d) {
    const uint16_t* m = b.mean + int64_t(interval) * b.key_dim + d;
    return b.key_dim - d < kLanes ? load_first(m, b.key_dim - d) : load(m);
  };
  for (int d = 0; d < b.key_dim; d += kLanes) store(newest + d, at(b.intervals - 1, d));
  for (int i = first; i < b.intervals; ++i) {
    Vec sum = zero();  // as dot_in_order
    for (int d = 0; d < b.key_dim; d += kLanes) sum = add(sum, mul(load(query + d), sub(at(i, d), load(newest + d))));
    const float x = sum_lanes(sum) / step;
    bias[i] = x > -kBiasLimit ? x < kBiasLimit ? int32_t(std::nearbyint(x)) : kBiasLimit : x == x ? -kBiasLimit : 0;
  }
}

// Scores of the slots [lo, hi), from the one at lo / 32 * 32 on; those of that block before lo and of the last one from hi on are the
// lowest there is.
inline void scan(const PackedBody& b, const uint8_t* table, const int32_t* bias, int lo, int hi, int16_t* scores) {
  const int groups = b.key_dim / 4, start = lo / 32 * 32;
  int end = lo, of_interval = 0;  // of the slots of one interval, which ends there
  auto enter = [&](int slot) {
    of_interval = bias[b.interval_of(b.positions[slot])];
    end = interval_end(b, slot, hi);
  };
  for (int block = start; block < hi; block += 32, scores += 32) {
    const int last = block + 32 < hi ? block + 32 : hi;
    // Far enough ahead for memory; addresses beyond the plane do no harm.
    for (int i = 0; i < 16 * groups; i += 64) __builtin_prefetch(b.codes(block) + kScanAhead + i, 0, 2);
    if (block == end) enter(block);
    const bool one_interval = block + 32 <= end;
    scan_block(b.codes(block), table, groups, one_interval ? of_interval : 0, scores);  // one call, which is then part of this loop
    if (one_interval) continue;
    for (int slot = block < lo ? lo : block; slot < last; ++slot) {
      if (slot == end) enter(slot);
      scores[slot - block] = int16_t(scores[slot - block] + of_interval);
    }
    for (int i = 0; i < lo - block; ++i) scores[i] = INT16_MIN;
    for (int i = last - block; i < 32; ++i) scores[i] = INT16_MIN;
  }
}

void retrieve(const Retrieval& r, int head, int row, void* memory) {
  const auto& p = r.params;
  const PackedBody b(p, r.state, head, r.tail_base);
  const edgekv::RetrievalWork sizes(r);
  const int dim = p.key_dim, stride = packed_stride(dim), biases = (b.intervals + 15) / 16 * 16;
  float* turned = static_cast<float*>(memory);  // [group][stride]
  float* together = turned + r.group * stride;
  float* own = together + stride;                                    // the table before it is rounded
  float* largest = own + 4 * dim;                                    // [kTile]
  float* of_mean = largest + kTile;                                  // [group][boundaries]
  int32_t* bias = reinterpret_cast<int32_t*>(of_mean + r.group * biases);  // [boundaries]
  WholeQuery* whole = reinterpret_cast<WholeQuery*>(bias + biases);  // [group]
  int8_t* levels = reinterpret_cast<int8_t*>(whole + r.group);       // [group][stride]
  float* weight = static_cast<float*>(memory) + sizes.queries;      // [ranked]
  float* of_head = weight + sizes.ranked;                           // [ranked], those of one query head
  float* exact = of_head + sizes.ranked;                            // [group][ranked]
  int32_t* candidates = reinterpret_cast<int32_t*>(exact + r.group * sizes.ranked);
  int16_t* scores = reinterpret_cast<int16_t*>(candidates + sizes.candidates);
  int32_t* out = r.slots + (int64_t(head) * r.rows + row) * edgekv::slots_stride(r.retrieve, r.scored, r.group);
  float* out_scores = reinterpret_cast<float*>(out + r.retrieve);  // [group][retrieve], if they are wanted

  // The query heads together, and each for the second ranking.
  float rotated[1024], projected[1024], sum[1024] = {};
  for (int g = 0; g < r.group; ++g) {
    const float* q = r.q.data + (head * r.group + g) * r.q.head_stride + row * r.q.row_stride;
    const int64_t at = int64_t(row) * r.table_stride + edgekv::table_at(p, head), map_at = int64_t(head * r.group + g) * edgekv::given_dim(p) * dim;
    auto mapped = [&](auto* maps) {
      return rotate_and_project(p, q, r.cos ? r.cos + at : nullptr, r.cos ? r.sin + at : nullptr, maps ? maps + map_at : nullptr, rotated, projected);
    };
    q = p.element == edgekv::kFloat16 ? mapped(static_cast<const uint16_t*>(r.query_map)) : mapped(static_cast<const float*>(r.query_map));
    for (int d = 0; d < dim; ++d) sum[d] = g == 0 ? q[d] : sum[d] + q[d];
    std::memcpy(turned + g * stride, q, size_t(dim) * sizeof(float));
  }
  for (int d = 0; d < dim; ++d) sum[d] *= p.scale;
  std::memcpy(together, sum, size_t(dim) * sizeof(float));
  hadamard(together, dim);

  const int64_t query = r.position + row, oldest = p.sliding_window > 0 ? query - p.sliding_window : -1;
  const int lo = oldest < 0 ? 0 : first_after(b.positions, r.body_count, oldest), hi = r.body_count, visible = hi - lo;
  const int wanted = r.retrieve < visible ? r.retrieve : visible;
  for (int i = wanted; i < r.retrieve; ++i) out[i] = -1;
  if (wanted == 0) return;
  uint64_t keys_read = 0, index_read = 0, meta_read = 0;
  const int first = b.interval_of(b.positions[lo]);
  int found = visible, above;
  if (wanted < visible) {
    alignas(64) uint8_t table[256 * 16];
    const float* codebook = r.state.codebook + int64_t(head) * dim / 4 * 64;
    const float step = score_table(together, codebook, dim, own, table);
    interval_biases(b, sum, first, step, bias);
    scan(b, table, bias, lo, hi, scores);
    const int start = lo / 32 * 32, scanned = (hi - start + 31) / 32 * 32;
    const int asked = r.candidates > wanted ? r.candidates : wanted;
    index_read = uint64_t(scanned / 32) * dim / 4 * 16;
    meta_read = uint64_t(visible) * 4 + uint64_t(dim) * 64 + uint64_t(b.intervals - first) * dim * 2;
    if (asked < visible) {
      const int threshold = threshold_of_blocks(scores, scanned, asked, &above);
      found = collect(scores, scanned, threshold, asked - above, start, candidates);
    }
  }
  if (found == visible)
    for (int i = 0; i < found; ++i) candidates[i] = lo + i;

  const bool again = found > wanted;
  if (again || r.scored) {
    fetch_first(b, candidates, found, true);
    const float factor = score_factor(p);
    for (int g = 0; g < r.group; ++g)
      for (int d = dim; d < stride; ++d) turned[g * stride + d] = 0;
    means_in_order(b, turned, stride, r.group, first, factor, of_mean);
    for (int g = 0; g < r.group; ++g) {
      hadamard(turned + g * stride, dim);
      whole[g] = whole_query(turned + g * stride, stride, factor, levels + g * stride);
    }
    for (int at = 0; at < found; at += kTile) {
      const PickedSlots t = {b, candidates + at, found - at < kTile ? found - at : kTile, found - at};
      key_dots(t, levels, whole, r.group, stride, largest, exact + at, sizes.ranked);
      scores_of_products(t, whole, r.group, largest, of_mean, exact + at, sizes.ranked);
    }
    meta_read += uint64_t(found) * 4 + uint64_t(b.intervals - first) * dim * 2 * r.group;
    index_read += uint64_t(found) * b.sign_bytes();
    keys_read = uint64_t(found) * b.key_bytes();
  }
  int kept = found;
  if (again) {
    rank_again(exact, sizes.ranked, found, r.group, p.softcap, of_head, weight);
    // Weights are not negative, so their bits are in their order.
    using Bits = int32_t __attribute__((may_alias));
    const Bits* order = reinterpret_cast<Bits*>(weight);
    const int threshold = threshold_for(order, found, wanted, &above);
    const Kept lists = {candidates, out, exact, sizes.ranked, out_scores, r.retrieve, r.scored ? r.group : 0};
    kept = keep_best(order, found, threshold, wanted - above, lists, reinterpret_cast<int32_t*>(of_head));
  } else {
    std::memcpy(out, candidates, size_t(found) * sizeof(int32_t));
    if (r.scored)
      for (int g = 0; g < r.group; ++g) std::memcpy(out_scores + int64_t(g) * r.retrieve, exact + g * sizes.ranked, size_t(found) * sizeof(float));
  }
  // A damaged state may have had scores out of range, and fewer of them above the threshold than it should.
  for (int i = kept; i < wanted; ++i) out[i] = -1;
  __atomic_fetch_add(&r.loaded->body_index, index_read, __ATOMIC_RELAXED);
  __atomic_fetch_add(&r.loaded->body_keys, keys_read, __ATOMIC_RELAXED);
  __atomic_fetch_add(&r.loaded->body_meta, meta_read, __ATOMIC_RELAXED);
}

}  // namespace
