// Tokens picked here and there from a compressed body: their weighted values. Records are read straight into registers; the query heads of a
// kv head, four at a time, meet a value where it is unpacked.
#pragma once
#include "cpu/attend_tile.h"
#include "cpu/picked_slots.h"

namespace {

using edgekv::pair_floats;
using edgekv::picked_floats;

constexpr int kHeadsAtOnce = 4;

// What up to kTile picked tokens need before their values are read: pairs in single precision, kept in `memory`, which has picked_floats().
struct Picked : PickedSlots {
  float* pairs;

  Picked(const PickedSlots& t, float* memory) : PickedSlots(t), pairs(memory) {
    const int width = int(pair_floats(body.value_dim)), groups = body.value_groups();
    for (int i = 0; i < count; ++i) {
      const uint16_t* from = reinterpret_cast<const uint16_t*>(record(i) + body.record.value_pairs);
      for (int n = 0; n < width; n += kLanes) store(pairs + i * width + n, pairs_of_record(from + n, groups - n / 2));
    }
  }
};

template <int kBits>
inline void order_values_of(const float* in, int dim, float* out) {
  float group[32];
  for (int d = 0; d < dim; d += 32) {
#pragma GCC unroll 32
    for (int n = 0; n < 32; ++n) group[n] = in[d + place<kBits>(n)];
    std::memcpy(out + d, group, size_t(dim - d < 32 ? dim - d : 32) * sizeof(float));
  }
}

// Numbers [dim] in the order in which value_group hands them over, as they were.
inline void order_values(int bits, const float* in, int dim, float* out) {
  bits == 2 ? order_values_of<2>(in, dim, out) : bits == 4 ? order_values_of<4>(in, dim, out) : order_values_of<8>(in, dim, out);
}

// Adds the weighted values of picked tokens to G groups of 32 numbers, from group `first` on, of R rows: sums [R][sums_stride] in the order
// in which value_group hands numbers over, weights [R][kTile].
// With `ahead` it asks for the records of the next tile on the way.
template <int R, int G, int kBits>
inline void add_picked(const Picked& t, int first, const float* weights, float* sums, int64_t sums_stride, bool ahead) {
  const PackedBody& b = t.body;
  const int width = int(pair_floats(b.value_dim));
  const size_t codes = b.record.values + size_t(4) * kBits * first;
  const float* pair = t.pairs + 2 * first;
  const bool codes_ahead = ahead && first == 0, pairs_ahead = ahead && first + G >= b.value_groups();
  Vec sum[R][2 * G];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < 2 * G; ++n) sum[r][n] = load(sums + r * sums_stride + 32 * first + 16 * n);
  for (int i = 0; i < t.count; ++i) {
    const uint8_t* record = t.record(i) + codes;
    if (i + kTile < t.listed) {
      if (codes_ahead) b.fetch_value_codes(t.slots[i + kTile]);
      if (pairs_ahead) b.fetch_value_pairs(t.slots[i + kTile]);
    }
    Vec value[2 * G];
    for (int g = 0; g < G; ++g) value_group<kBits>(record + 4 * kBits * g, pair + i * width + 2 * g, value + 2 * g);
    for (int r = 0; r < R; ++r) {
      const Vec w = splat(weights[r * kTile + i]);
      for (int n = 0; n < 2 * G; ++n) sum[r][n] = fma(value[n], w, sum[r][n]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < 2 * G; ++n) store(sums + r * sums_stride + 32 * first + 16 * n, sum[r][n]);
}

template <int R, int kBits>
inline void add_picked_groups(const Picked& t, const float* weights, float* sums, int64_t stride, bool ahead) {
  constexpr int kGroups = R * 4 <= kAccumulators ? 2 : 1;
  int g = 0;
  for (; g + kGroups <= t.body.value_groups(); g += kGroups) add_picked<R, kGroups, kBits>(t, g, weights, sums, stride, ahead);
  if (g < t.body.value_groups()) add_picked<R, 1, kBits>(t, g, weights, sums, stride, ahead);
}

template <int kBits>
inline void add_picked_rows(const Picked& t, int rows, const float* weights, float* sums, int64_t stride) {
  for (int r = 0; r < rows; r += kHeadsAtOnce) {
    const float* w = weights + r * kTile;
    float* to = sums + r * stride;
    switch (rows - r) {
      case 1: add_picked_groups<1, kBits>(t, w, to, stride, r == 0); break;
      case 2: add_picked_groups<2, kBits>(t, w, to, stride, r == 0); break;
      case 3: add_picked_groups<3, kBits>(t, w, to, stride, r == 0); break;
      default: add_picked_groups<4, kBits>(t, w, to, stride, r == 0);
    }
  }
}

template <int R>
inline void add_chosen(int rows, const float* values, int value_stride, int dims, int count, const float* weights, float* sums, int stride) {
  if constexpr (R > 1) {
    if (rows < R) return add_chosen<R - 1>(rows, values, value_stride, dims, count, weights, sums, stride);
  }
  Ahead nothing_ahead = {nullptr, nullptr};
  add_value_tile<float, R, vectors_for(R)>(values, value_stride, dims, 0, count, count, nullptr, weights, sums, stride, nothing_ahead);
}

// Adds the weighted values of picked tokens to sums [rows][stride], weights [rows][kTile]; values: room for a tile of them.
inline void add_values_of(const Picked& t, int rows, const float* weights, float* sums, int stride, float* values) {
  if constexpr (kSumsInRegisters) {
    switch (t.body.value_bits) {
      case 2: return add_picked_rows<2>(t, rows, weights, sums, stride);
      case 4: return add_picked_rows<4>(t, rows, weights, sums, stride);
      default: return add_picked_rows<8>(t, rows, weights, sums, stride);
    }
  }
  const int value_stride = packed_stride(t.body.value_dim);
  for (int i = 0; i < t.count; ++i) {
    t.fetch_value(i);
    unpack_value(t.body, t.slots[i], values + i * value_stride);
  }
  for (int r = 0; r < rows; r += kRowBlock)
    add_chosen<kRowBlock>(rows - r < kRowBlock ? rows - r : kRowBlock, values, value_stride, value_stride, t.count, weights + r * kTile,
                          sums + int64_t(r) * stride, stride);
}

}  // namespace
