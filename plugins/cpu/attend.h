// The attention kernels, written once on the vector type of the simd_*.h included before this file.
//
// What decides the bits of a row: its scores are sums over the key dimensions in order; tiles of kTile slots start at multiples
// of kTile in the body and in the tail; inside a tile the weighted values are added slot by slot. How many rows are computed
// together, and on which thread, decides nothing.
#pragma once
#include "cpu/attend_tile.h"

namespace {

using edgekv::Part;

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
void attend_latent(const Step&, int head, int first, int count, int begin, int end, float* partial, float* work);  // attend_latent.h
void attend_packed_latent(const Step&, int head, int first, int count, int begin, int end, float* partial, float* work);  // attend_packed_latent.h

inline void attend(const Step& s, int head, int first, int count, Part part, int begin, int end, float* partial, float* work) {
  if (part == edgekv::kBody && s.params.latent > 0 && s.params.format == edgekv::kFormatSelfIndex)
    attend_packed_latent(s, head, first, count, begin, end, partial, work);
  else if (part == edgekv::kBody && s.params.format == edgekv::kFormatSelfIndex)
    attend_packed(s, head, first, count, begin, end, partial, work);
  else if (part == edgekv::kBody && s.params.latent > 0)
    attend_latent(s, head, first, count, begin, end, partial, work);
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
