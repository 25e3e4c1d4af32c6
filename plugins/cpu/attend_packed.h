// Attention to a compressed body: all of it, tile by tile unpacked for many rows, or the slots that each row has chosen.
//
// Values stay transformed until a split has been summed up. A row's bits depend on its own slots alone: tiles of kTile slots start
// at multiples of kTile of the body, or of the list of chosen slots.
#pragma once
#include "cpu/attend.h"
#include "cpu/packed_queries.h"

namespace {

inline void count_packed(const Step& s, const PackedBody& b, uint64_t tokens, uint64_t means) {
  __atomic_fetch_add(&s.loaded->body_index, tokens * b.sign_bytes(), __ATOMIC_RELAXED);
  __atomic_fetch_add(&s.loaded->body_keys, tokens * b.key_bytes(), __ATOMIC_RELAXED);
  __atomic_fetch_add(&s.loaded->body_values, tokens * b.value_bytes(), __ATOMIC_RELAXED);
  __atomic_fetch_add(&s.loaded->body_meta, tokens * 4 + means * 2 * b.key_dim, __ATOMIC_RELAXED);
}

// The tokens [begin, end) of the body as a tile of float32, begin a multiple of 16: keys 16 side by side, values one by one. Returns
// how often a mean key was loaded.
inline int unpack_tile(const PackedBody& b, int begin, int end, float* keys, float* values, float* rows) {
  const int dim = packed_stride(b.key_dim), value_stride = packed_stride(b.value_dim);
  float* mean = rows + kLanes * dim;
  BlockSigns signs;
  IntervalCursor cursor;
  int loaded = 0, at_hand = -1;
  for (int block = begin; block < end; block += kLanes, keys += b.key_dim * kLanes) {
    const int count = end - block < kLanes ? end - block : kLanes;
    for (int j = 0; j < kLanes; ++j) {
      float* row = rows + j * dim;
      if (j >= count) {
        std::memset(row, 0, size_t(dim) * sizeof(float));
        continue;
      }
      const int interval = cursor.at(b, block + j);
      if (interval != at_hand) {
        const uint16_t* m = b.mean + int64_t(interval) * b.key_dim;
        for (int d = 0; d < b.key_dim; d += kLanes) store(mean + d, load_first(m + d, b.key_dim - d < kLanes ? b.key_dim - d : kLanes));
        hadamard(mean, b.key_dim);
        at_hand = interval;
        ++loaded;
      }
      unpack_key(b, signs, block + j, row);
      for (int d = 0; d < b.key_dim; d += kLanes) store(row + d, add(load(row + d), load(mean + d)));
      unpack_value(b, block + j, values);
      values += value_stride;
    }
    for (int d = 0; d < b.key_dim; d += kLanes) {
      Vec x[kLanes];
      for (int j = 0; j < kLanes; ++j) x[j] = load(rows + j * dim + d);
      transpose(x);
      for (int i = 0; i < kLanes && d + i < b.key_dim; ++i) store(keys + (d + i) * kLanes, x[i]);
    }
  }
  return loaded;
}

inline void attend_whole(const Step& s, const PackedBody& b, int head, int first, int count, int begin, int end, float* partial, float* work) {
  const auto& p = s.params;
  const int value_stride = packed_stride(p.value_dim);
  float *keys = work, *values = keys + kTile * p.key_dim, *rows = values + kTile * value_stride;
  const SeenRows seen(s, head, edgekv::kBody, first, count, begin, end);
  const float* queries = s.turned + (int64_t(head) * s.rows * s.group + first) * p.key_dim;
  uint64_t tokens = 0, means = 0;
  for (int at = begin; at < seen.highest; at += kTile) {
    const int size = seen.highest - at < kTile ? seen.highest - at : kTile;
    if (at + size <= seen.lowest) continue;
    const int skipped = seen.lowest > at ? (seen.lowest - at) / kLanes * kLanes : 0;
    means += unpack_tile(b, at + skipped, at + size, keys + skipped * p.key_dim, values + skipped * value_stride, rows);
    tokens += size - skipped;
    attend_tile<float>({keys, values, p.key_dim, p.value_dim, value_stride, size, p.softcap, true}, seen, at, count, queries, partial);
  }
  count_packed(s, b, tokens, means);
}

// Empties the sums over chosen tokens of `rows` rows, `stride` apart: values by lane, weights by lane, the largest score.
inline void clear_sums(int rows, int width, int stride, float* sums) {
  for (int r = 0; r < rows; ++r) {
    std::memset(sums + r * stride, 0, size_t(width + kLanes) * sizeof(float));
    sums[r * stride + width + kLanes] = kNothing;
  }
}

// Makes partials of them.
inline void partials_of(const edgekv::LayerParams& p, int rows, int width, int stride, const float* sums, float* partial) {
  const int result_width = edgekv::partial_width(p.value_dim);
  for (int r = 0; r < rows; ++r, sums += stride, partial += edgekv::partial_stride(p.value_dim)) {
    order_values(p.value_bits, sums, p.value_dim, partial);
    std::memcpy(partial + result_width, sums + width, (kLanes + 1) * sizeof(float));
  }
}

// Attends to a compressed body: all rows with whole(first, count, partial), or, where slots were chosen for them, those of each token with
// chosen(row, rows, partial). Turns the values back.
template <class Whole, class Chosen>
inline void attend_compressed(const Step& s, int first, int count, float* partial, Whole whole, Chosen chosen) {
  const int stride = edgekv::partial_stride(s.params.value_dim);
  clear_partials(count, s.params.value_dim, partial);
  if (s.slots == nullptr) {
    whole(first, count, partial);
  } else {
    for (int r = 0, next; r < count; r = next) {
      next = ((first + r) / s.group + 1) * s.group - first;
      if (next > count) next = count;
      chosen(first + r, next - r, partial + int64_t(r) * stride);
    }
  }
  for (int r = 0; r < count; ++r) hadamard(partial + int64_t(r) * stride, s.params.value_dim);
}

// The rows of one token: `rows` of them from `row` of the kv head on.
inline void attend_chosen(const Step& s, const PackedBody& b, int head, int row, int rows, int begin, int end, float* partial, float* work) {
  const auto& p = s.params;
  const int width = packed_stride(p.value_dim), stride = width + 32, dim = packed_stride(p.key_dim);
  float *values = work, *scores = values + kTile * width, *picked = scores + kTile * rows, *largest = picked + picked_floats(p.value_dim);
  float* sums = largest + kTile;  // as partials, but in the order of value_group
  int8_t* levels = reinterpret_cast<int8_t*>(sums + int64_t(rows) * stride);
  const int64_t at_row = int64_t(head) * s.rows * s.group + row;
  const int32_t* slots = s.slots + (int64_t(head) * s.rows + row / s.group) * edgekv::slots_stride(s.chosen, s.scored, s.group);
  const float* known = reinterpret_cast<const float*>(slots + s.chosen) + int64_t(row % s.group) * s.chosen;
  int listed = s.chosen;
  while (listed > 0 && slots[listed - 1] < 0) --listed;
  if (end > listed) end = listed;
  if (begin == 0) fetch_first(b, slots, listed, !s.scored);  // those of later splits have been asked for by the one before
  WholeQuery whole[kRowBlocks * kRowBlock];
  for (int r = 0; r < rows && !s.scored; ++r) whole[r] = whole_query(s.turned + (at_row + r) * dim, dim, score_factor(p), levels + r * dim);
  clear_sums(rows, width, stride, sums);
  for (int at = begin; at < end; at += kTile) {
    const int size = end - at < kTile ? end - at : kTile;
    const PickedSlots t = {b, slots + at, size, listed - at};
    if (s.scored) {
      for (int r = 0; r < rows; ++r) std::memcpy(scores + r * kTile, known + int64_t(r) * s.chosen + at, size_t(size) * sizeof(float));
    } else {
      key_dots(t, levels, whole, rows, dim, largest, scores, kTile);
      scores_of_products(t, whole, rows, largest, s.bias + at_row * b.intervals, scores, kTile);
    }
    for (int r = 0; r < rows; ++r) soften({sums + r * stride, width}, scores + r * kTile, 0, (size + kLanes - 1) / kLanes, 0, size, p.softcap);
    add_values_of({t, picked}, rows, scores, sums, stride, values);
  }
  partials_of(p, rows, width, stride, sums, partial);
  const uint64_t tokens = end > begin ? uint64_t(end - begin) : 0;
  if (s.scored)
    __atomic_fetch_add(&s.loaded->body_values, tokens * b.value_bytes(), __ATOMIC_RELAXED);
  else
    count_packed(s, b, tokens, 0);
}

void attend_packed(const Step& s, int head, int first, int count, int begin, int end, float* partial, float* work) {
  const PackedBody b(s.params, s.state, head, s.position - s.first_tail);
  attend_compressed(
      s, first, count, partial, [&](int row, int rows, float* to) { attend_whole(s, b, head, row, rows, begin, end, to, work); },
      [&](int row, int rows, float* to) { attend_chosen(s, b, head, row, rows, begin, end, to, work); });
}

}  // namespace
