// The attention kernels, written once on the vector type of the simd_*.h included before this file.
//
// What decides the bits of a row: its scores are sums over the key dimensions in order; tiles of kTile slots start at multiples
// of kTile in the body and in the tail; inside a tile the weighted values are added slot by slot. How many rows are computed
// together, and on which thread, decides nothing.
#pragma once
#include <cmath>
#include <cstring>

#include "cpu/kernels.h"

namespace {

using edgekv::kRowBlocks;
using edgekv::kTile;
using edgekv::Part;
using edgekv::Step;

constexpr int kLanes = EDGEKV_LANES;
constexpr float kNothing = -__builtin_inff();

// ---- prepare: rotate, store, pack

// out = in with the pairs of the first rotary_dim numbers rotated: (a, b) -> (a cos - b sin, b cos + a sin).
inline void rotate(const float* in, float* out, int dim, int rotary_dim, bool interleaved, const float* cos, const float* sin) {
  const int half = rotary_dim / 2;
  if (interleaved) {
    for (int i = 0; i < half; ++i) {
      const float a = in[2 * i], b = in[2 * i + 1];
      out[2 * i] = a * cos[i] - b * sin[i];
      out[2 * i + 1] = b * cos[i] + a * sin[i];
    }
  } else {
    for (int i = 0; i < half; ++i) {
      const float a = in[i], b = in[i + half];
      out[i] = a * cos[i] - b * sin[i];
      out[i + half] = b * cos[i] + a * sin[i];
    }
  }
  std::memcpy(out + rotary_dim, in + rotary_dim, size_t(dim - rotary_dim) * sizeof(float));
}

// out[j] = sum over d of in[d] * map[d][j], map [from][to]: four sums, of every fourth d, added in pairs (one sum would wait for itself);
// products and sums apart, so that every instruction set and the oracle round alike.
inline void project(const float* in, const float* map, int from, int to, float* out) {
  int j = 0;
  for (; j + kLanes <= to; j += kLanes) {
    Vec sum[4] = {zero(), zero(), zero(), zero()};
    auto take = [&](int d, int i) { sum[i] = add(sum[i], mul(load(map + int64_t(d) * to + j), splat(in[d]))); };
    int d = 0;
    for (; d + 4 <= from; d += 4) take(d, 0), take(d + 1, 1), take(d + 2, 2), take(d + 3, 3);
    for (int i = 0; d < from; ++d, ++i) take(d, i);
    store(out + j, add(add(sum[0], sum[1]), add(sum[2], sum[3])));
  }
  for (; j < to; ++j) {
    float sum[4] = {0, 0, 0, 0};
    for (int d = 0; d < from; ++d) sum[d % 4] += map[int64_t(d) * to + j] * in[d];
    out[j] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
}

// A query or key as it meets the others: rotated when there are tables, projected when there is a map [given_dim][key_dim] of its head.
// Points to `in` or to one of the two pieces of working memory of 1024 floats.
inline const float* rotate_and_project(const edgekv::LayerParams& p, const float* in, const float* cos, const float* sin, const float* map,
                                       float* rotated, float* projected) {
  const int dim = edgekv::given_dim(p);
  if (cos != nullptr) {
    rotate(in, rotated, dim, p.rotary_dim, p.rotary_interleaved, cos, sin);
    in = rotated;
  }
  if (map == nullptr) return in;
  project(in, map, dim, p.key_dim, projected);
  return projected;
}

template <class E>
inline void store_row(E* to, const float* from, int dim) {
  int d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(to + d, load(from + d));
  if (d < dim) store_first(to + d, load_first(from + d, dim - d), dim - d);
}

template <class E>
void prepare_head(const Step& s, int head) {
  const auto& p = s.params;
  const int dim = p.key_dim;
  const int64_t map_size = int64_t(edgekv::given_dim(p)) * dim;
  float rotated[1024], projected[1024];
  auto row = [&](const edgekv::Rows& x, const float* maps, int h, int t) {
    const int64_t at = int64_t(t) * s.table_stride;
    return rotate_and_project(p, x.data + h * x.head_stride + t * x.row_stride, s.cos ? s.cos + at : nullptr, s.cos ? s.sin + at : nullptr,
                              maps ? maps + h * map_size : nullptr, rotated, projected);
  };

  E element[1024];
  E* tail_k = reinterpret_cast<E*>(s.state.tail_k) + int64_t(head) * p.tail_slots * dim;
  E* tail_v = reinterpret_cast<E*>(s.state.tail_v) + int64_t(head) * p.tail_slots * p.value_dim;
  for (int t = 0; t < s.rows; ++t) {
    const int slot = s.first_tail + t;
    store_row(element, row(s.k, s.key_map, head, t), dim);
    E* column = tail_k + int64_t(slot / kLanes) * dim * kLanes + slot % kLanes;
    for (int d = 0; d < dim; ++d) column[d * kLanes] = element[d];
    store_row(tail_v + int64_t(slot) * p.value_dim, s.v.data + head * s.v.head_stride + t * s.v.row_stride, p.value_dim);
  }

  const float factor = score_factor(p);
  const int all = s.rows * s.group, observed_from = p.tail_slots - p.observe;
  float* packed = s.queries + int64_t(head) * all * dim;
  for (int t = 0; t < s.rows; ++t) {
    for (int g = 0; g < s.group; ++g) {
      const float* q = row(s.q, s.query_map, head * s.group + g, t);
      const int observed = s.first_tail + t - observed_from;
      if (edgekv::keeps_scores(p) && observed >= 0)
        store_row(reinterpret_cast<E*>(s.state.tail_q) + (int64_t(head * s.group + g) * p.observe + observed) * dim, q, dim);
      const int r = t * s.group + g, block = r / kRowBlock * kRowBlock;
      const int width = all - block < kRowBlock ? all - block : kRowBlock;
      float* to = packed + int64_t(block) * dim + (r - block);
      for (int d = 0; d < dim; ++d) to[d * width] = q[d] * factor;
      if (p.format == edgekv::kFormatSelfIndex) prepare_packed(s, head, r, q, factor);
    }
  }
}

inline void prepare(const Step& s, int head) {
  if (s.params.element == edgekv::kFloat16)
    prepare_head<uint16_t>(s, head);
  else
    prepare_head<float>(s, head);
}

// ---- attend

// Memory that is needed next, brought closer while something else is computed: the values of a tile during its scores, the keys of
// the next tile during the values. Addresses beyond the planes do no harm.
struct Ahead {
  const char* next;
  const char* end;
  template <int kBytes>
  void fetch() {
    if (next >= end) return;
    for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(next + i, 0, 2);
    next += kBytes;
  }
};

// Running result of one row, in a partial (kernels.h).
struct RowState {
  float* at;
  int width;
  float* sums() const { return at + width; }
  float& highest() const { return at[width + 16]; }
};

// Scores of R rows against V blocks of 16 keys. keys [V][dim][16], queries [dim][R], out R rows of `stride`.
template <class E, int R, int V>
inline void score_blocks(const E* keys, int dim, const float* queries, float* out, int64_t stride, Ahead& ahead) {
  Vec sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = zero();
  for (int d = 0; d < dim; ++d) {
    Vec key[V];
    for (int v = 0; v < V; ++v) key[v] = load(keys + (int64_t(v) * dim + d) * kLanes);
    ahead.fetch<V * kLanes * int(sizeof(E))>();
    for (int r = 0; r < R; ++r) {
      const Vec q = splat(queries[d * R + r]);
      for (int v = 0; v < V; ++v) sum[r][v] = fma(key[v], q, sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(out + r * stride + v * kLanes, sum[r][v]);
}

template <class E, int R, int V>
inline void score_tile(const E* keys, int blocks, int dim, const float* queries, float* out, int64_t stride, Ahead& ahead) {
  while (blocks >= V) {
    score_blocks<E, R, V>(keys, dim, queries, out, stride, ahead);
    keys += int64_t(V) * dim * kLanes;
    out += V * kLanes;
    blocks -= V;
  }
  if constexpr (V > 1) score_tile<E, R, V / 2>(keys, blocks, dim, queries, out, stride, ahead);
}

// Turns the scores of one row into weights, in place, and rescales what the row has summed so far. The row sees the slots
// [lo, hi) of the tile; scores exist for the blocks [first, last).
inline void soften(RowState row, float* scores, int first, int last, int lo, int hi, float softcap) {
  const Vec nothing = splat(kNothing);
  Vec top = nothing;
  for (int b = first; b < last; ++b) {
    float* at = scores + b * kLanes;
    Vec x = load(at);
    if (softcap > 0) x = mul(tanh(x), splat(softcap * kLog2E));
    if (lo > b * kLanes || hi < (b + 1) * kLanes) x = keep_lanes(x, lo - b * kLanes, hi - b * kLanes, nothing);
    store(at, x);
    top = max(x, top);
  }
  const float before = row.highest(), tile = max_lanes(top), highest = tile > before ? tile : before;
  const float base = highest == kNothing ? 0.0f : highest;
  Vec sums = load(row.sums());
  if (highest != before) {
    const Vec factor = splat(exp2_one(before - base));
    sums = mul(sums, factor);
    for (int i = 0; i < row.width; i += kLanes) store(row.at + i, mul(load(row.at + i), factor));
    row.highest() = highest;
  }
  for (int b = first; b < last; ++b) {
    float* at = scores + b * kLanes;
    const Vec weight = exp2(sub(load(at), splat(base)));
    store(at, weight);
    sums = add(sums, weight);
  }
  store(row.sums(), sums);
}

// Adds the weighted values of slots [begin, end) to 16 * N dimensions of R rows. Slots from `common` on are seen by some rows
// only: row r stops before hi[r], so that what a later token stored never enters an earlier row, not even multiplied by zero.
template <class E, int R, int N, bool kPartial>
inline void add_values(const E* values, int64_t stride, int lanes, int begin, int common, int end, const int* hi, const float* weights,
                       float* sums, int sums_stride, Ahead& ahead) {
  Vec sum[R][N];
  auto value = [&](int slot, int n) {
    const E* at = values + slot * stride + n * kLanes;
    if constexpr (kPartial)
      return load_first(at, lanes);
    else
      return load(at);
  };
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sum[r][n] = load(sums + r * sums_stride + n * kLanes);
  for (int slot = begin; slot < common; ++slot) {
    Vec v[N];
    for (int n = 0; n < N; ++n) v[n] = value(slot, n);
    ahead.fetch<N * kLanes * int(sizeof(E))>();
    for (int r = 0; r < R; ++r) {
      const Vec w = splat(weights[r * kTile + slot]);
      for (int n = 0; n < N; ++n) sum[r][n] = fma(v[n], w, sum[r][n]);
    }
  }
  for (int slot = common; slot < end; ++slot) {
    Vec v[N];
    for (int n = 0; n < N; ++n) v[n] = value(slot, n);
    for (int r = 0; r < R; ++r) {
      if (slot >= hi[r]) continue;
      const Vec w = splat(weights[r * kTile + slot]);
      for (int n = 0; n < N; ++n) sum[r][n] = fma(v[n], w, sum[r][n]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(sums + r * sums_stride + n * kLanes, sum[r][n]);
}

template <class E, int R, int N>
inline void add_value_tile(const E* values, int64_t stride, int dims, int begin, int common, int end, const int* hi,
                           const float* weights, float* sums, int sums_stride, Ahead& ahead) {
  while (dims >= N * kLanes) {
    add_values<E, R, N, false>(values, stride, kLanes, begin, common, end, hi, weights, sums, sums_stride, ahead);
    values += N * kLanes;
    sums += N * kLanes;
    dims -= N * kLanes;
  }
  if constexpr (N > 1)
    add_value_tile<E, R, N / 2>(values, stride, dims, begin, common, end, hi, weights, sums, sums_stride, ahead);
  else if (dims > 0)
    add_values<E, R, 1, true>(values, stride, dims, begin, common, end, hi, weights, sums, sums_stride, ahead);
}

// Vectors per row that keep the running sums of R rows in registers.
constexpr int vectors_for(int rows) {
  int n = 8;
  while (n > 1 && n * rows > kAccumulators) n /= 2;
  return n;
}

// A tile of a kv head: slots [0, size) at keys and values. lo and hi are relative to it.
template <class E>
struct Tile {
  const E *keys, *values;
  int key_dim, value_dim, value_stride, size;
  float softcap;
  bool fetched;  // an earlier block of rows has brought the tile into the cache
};

template <class E, int R>
__attribute__((noinline)) void attend_block(const Tile<E>& tile, const float* queries, const int* lo, const int* hi, float* partial, int stride, int width) {
  int begin = tile.size, common = tile.size, end = 0, limit[R];
  for (int r = 0; r < R; ++r) {
    limit[r] = hi[r] < tile.size ? hi[r] : tile.size;
    if (limit[r] <= lo[r] || limit[r] <= 0) limit[r] = 0;
    if (limit[r] > 0 && lo[r] < begin) begin = lo[r];
    if (limit[r] < common) common = limit[r];
    if (limit[r] > end) end = limit[r];
  }
  if (end == 0) return;  // nothing seen: weights of zero would change nothing
  if (begin < 0) begin = 0;
  if (common < begin) common = begin;
  alignas(64) float scores[R * kTile];
  const int first = begin / kLanes, last = (end + kLanes - 1) / kLanes;
  auto bytes = [](const E* from, int count) {
    const char* at = reinterpret_cast<const char*>(from);
    return Ahead{at, at + size_t(count) * sizeof(E)};
  };
  Ahead ahead = bytes(tile.values, tile.fetched ? 0 : tile.size * tile.value_dim);
  score_tile<E, R, vectors_for(R)>(tile.keys + int64_t(first) * tile.key_dim * kLanes, last - first, tile.key_dim, queries,
                                   scores + first * kLanes, kTile, ahead);
  for (int r = 0; r < R; ++r) {
    if (limit[r] > 0) {
      soften({partial + int64_t(r) * stride, width}, scores + r * kTile, first, last, lo[r], limit[r], tile.softcap);
    } else {
      std::memset(scores + r * kTile, 0, kTile * sizeof(float));
    }
  }
  ahead = bytes(tile.keys + kTile * tile.key_dim, tile.fetched ? 0 : kTile * tile.key_dim);
  add_value_tile<E, R, vectors_for(R)>(tile.values, tile.value_stride, tile.value_dim, begin, common, end, limit, scores, partial, stride,
                                       ahead);
}

template <class E, int R>
inline void attend_rows(int rows, const Tile<E>& tile, const float* queries, const int* lo, const int* hi, float* partial, int stride,
                        int width) {
  if constexpr (R > 1) {
    if (rows < R) return attend_rows<E, R - 1>(rows, tile, queries, lo, hi, partial, stride, width);
  }
  attend_block<E, R>(tile, queries, lo, hi, partial, stride, width);
}

// First of `count` ascending positions that is greater than `position`.
inline int first_after(const int32_t* positions, int count, int64_t position) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (positions[middle] > position)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// Slots [lo, hi) of a part that a row sees, from stored positions: those of the body ascend, sink i holds i, tail slot i
// tail_base + i.
struct Seen {
  int lo, hi;
};

inline Seen seen_slots(const Step& s, int head, Part part, int token) {
  const int64_t query = s.position + token, oldest = s.params.sliding_window > 0 ? query - s.params.sliding_window : -1;
  if (part == edgekv::kBody) {
    const int32_t* positions = s.state.body_pos + int64_t(head) * s.params.body_slots;
    return {oldest < 0 ? 0 : first_after(positions, s.body_count, oldest),
            s.body_count == 0 || positions[s.body_count - 1] <= query ? s.body_count : first_after(positions, s.body_count, query)};
  }
  const int64_t base = part == edgekv::kTail ? s.position - s.first_tail : 0, lo = oldest < base ? 0 : oldest - base + 1;
  const int hi = part == edgekv::kTail ? s.first_tail + token + 1 : s.sink_count;
  return {lo < hi ? int(lo) : hi, hi};
}

// The same for rows [first, first + count) of a kv head, and what any of them sees of the slots [begin, end).
struct SeenRows {
  int lo[kRowBlocks * kRowBlock], hi[kRowBlocks * kRowBlock], lowest, highest;

  SeenRows(const Step& s, int head, Part part, int first, int count, int begin, int end) : lowest(end), highest(begin) {
    for (int r = 0; r < count; ++r) {
      if (r > 0 && (first + r) % s.group != 0) {
        lo[r] = lo[r - 1], hi[r] = hi[r - 1];
        continue;
      }
      const Seen seen = seen_slots(s, head, part, (first + r) / s.group);
      lo[r] = seen.lo, hi[r] = seen.hi;
      if (seen.lo < lowest) lowest = seen.lo;
      if (seen.hi > highest) highest = seen.hi;
    }
    if (highest > end) highest = end;
  }
};

inline void clear_partials(int count, int value_dim, float* partial) {
  const int width = edgekv::partial_width(value_dim), stride = edgekv::partial_stride(value_dim);
  for (int r = 0; r < count; ++r, partial += stride) {
    std::memset(partial, 0, size_t(width + kLanes) * sizeof(float));
    partial[width + kLanes] = kNothing;
  }
}

// Rows [first, first + count) of a kv head against one tile, which starts at slot `at`.
template <class E>
inline void attend_tile(const Tile<E>& whole, const SeenRows& seen, int at, int count, const float* queries, float* partial) {
  const int width = edgekv::partial_width(whole.value_dim), stride = edgekv::partial_stride(whole.value_dim);
  for (int r = 0; r < count; r += kRowBlock) {
    Tile<E> tile = whole;
    tile.fetched |= r > 0;
    const int rows = count - r < kRowBlock ? count - r : kRowBlock;
    int from[kRowBlock], to[kRowBlock];
    for (int i = 0; i < rows; ++i) from[i] = seen.lo[r + i] - at, to[i] = seen.hi[r + i] - at;
    attend_rows<E, kRowBlock>(rows, tile, queries + int64_t(r) * whole.key_dim, from, to, partial + int64_t(r) * stride, stride, width);
  }
}

template <class E>
void attend_slots(const Step& s, int head, int first, int count, Part part, int begin, int end, float* partial) {
  const auto& p = s.params;
  const bool full = part != edgekv::kBody;  // counted as tail
  const int64_t slots = part == edgekv::kTail ? p.tail_slots : part == edgekv::kBody ? p.body_slots : (p.sinks + kLanes - 1) / kLanes * kLanes;
  const uint8_t* k = part == edgekv::kTail ? s.state.tail_k : part == edgekv::kBody ? s.state.body_k : s.state.sink_k;
  const uint8_t* v = part == edgekv::kTail ? s.state.tail_v : part == edgekv::kBody ? s.state.body_v : s.state.sink_v;
  const E* keys = reinterpret_cast<const E*>(k) + head * slots * p.key_dim;
  const E* values = reinterpret_cast<const E*>(v) + head * slots * p.value_dim;
  const SeenRows seen(s, head, part, first, count, begin, end);
  const float* queries = s.queries + (int64_t(head) * s.rows * s.group + first) * p.key_dim;
  clear_partials(count, p.value_dim, partial);
  uint64_t blocks = 0, slots_read = 0;
  for (int at = begin; at < seen.highest; at += kTile) {
    const int size = seen.highest - at < kTile ? seen.highest - at : kTile;
    if (at + size <= seen.lowest) continue;
    const Tile<E> tile = {keys + int64_t(at) * p.key_dim, values + int64_t(at) * p.value_dim, p.key_dim, p.value_dim, p.value_dim, size, p.softcap, false};
    attend_tile(tile, seen, at, count, queries, partial);
    const int skipped = seen.lowest > at ? seen.lowest - at : 0;
    blocks += (size + kLanes - 1) / kLanes - skipped / kLanes;
    slots_read += size - skipped;
  }
  const uint64_t key_bytes = blocks * kLanes * p.key_dim * sizeof(E), value_bytes = slots_read * p.value_dim * sizeof(E);
  __atomic_fetch_add(full ? &s.loaded->tail_keys : &s.loaded->body_keys, key_bytes, __ATOMIC_RELAXED);
  __atomic_fetch_add(full ? &s.loaded->tail_values : &s.loaded->body_values, value_bytes, __ATOMIC_RELAXED);
}

void attend_packed(const Step&, int head, int first, int count, int begin, int end, float* partial, float* work);  // attend_packed.h

inline void attend(const Step& s, int head, int first, int count, Part part, int begin, int end, float* partial, float* work) {
  if (part == edgekv::kBody && s.params.format == edgekv::kFormatSelfIndex)
    attend_packed(s, head, first, count, begin, end, partial, work);
  else if (s.params.element == edgekv::kFloat16)
    attend_slots<uint16_t>(s, head, first, count, part, begin, end, partial);
  else
    attend_slots<float>(s, head, first, count, part, begin, end, partial);
}

inline void merge(int count, int value_dim, float* sum, const float* part) {
  const int width = edgekv::partial_width(value_dim), stride = edgekv::partial_stride(value_dim);
  for (int r = 0; r < count; ++r, sum += stride, part += stride) {
    const float a = sum[width + kLanes], b = part[width + kLanes], highest = b > a ? b : a;
    const float base = highest == kNothing ? 0.0f : highest;
    const Vec keep = splat(exp2_one(a - base)), take = splat(exp2_one(b - base));
    for (int i = 0; i < width + kLanes; i += kLanes) store(sum + i, fma(load(sum + i), keep, mul(load(part + i), take)));
    sum[width + kLanes] = highest;
  }
}

inline void finish(const Step& s, int head, int first, int count, const float* sum) {
  const int dim = s.params.value_dim, width = edgekv::partial_width(dim), stride = edgekv::partial_stride(dim);
  for (int r = 0; r < count; ++r, sum += stride) {
    const int t = (first + r) / s.group, h = head * s.group + (first + r) % s.group;
    float* y = s.y + (int64_t(t) * s.params.q_heads + h) * dim;
    const float total = sum_lanes(load(sum + width));
    const Vec factor = splat(total == 0 ? 0.0f : 1.0f / total);
    // Adding zero turns -0 into 0: which of the two a sum ended on may depend on slots of weight zero.
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes) store(y + d, fma(load(sum + d), factor, zero()));
    if (d < dim) store_first(y + d, fma(load(sum + d), factor, zero()), dim - d);
  }
}

}  // namespace
