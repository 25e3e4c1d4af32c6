// Activations times 4- or 8-bit weights, without widening the weights: activations are quantised to 8 bits block by block (as
// MatMulNBits does at accuracy level 4), codes are multiplied as integers, and a block's sum is scaled once. A row gives the same
// bits whatever rows come with it and whatever the instruction set: integer sums are exact, and each output adds its blocks in order.
#pragma once
#include <cmath>

#include "cpu/kernels.h"

namespace edgekv {
namespace {

constexpr int kProductRows = 6;  // rows that share what is unpacked of a tile: their sums in 16 bits and what they meet fit sixteen registers

// Calls f(x, i, count) for every 16 numbers from i on; the last vector holds `count` < 16 of them and zeros.
template <class F>
inline void each_vector(const float* x, int64_t n, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(load(x + i), i, kLanes);
  if (i < n) f(load_first(x + i, int(n - i)), i, int(n - i));
}

inline Vec part_of(const float* x, int count) { return count == kLanes ? load(x) : load_first(x, count); }
inline void put(float* y, Vec x, int count) { count == kLanes ? store(y, x) : store_first(y, x, count); }

void normalise(const float* x, const float* weight, int64_t n, float epsilon, float* y) {
  Vec sum = zero();
  each_vector(x, n, [&](Vec v, int64_t, int) { sum = fma(v, v, sum); });
  const Vec factor = splat(1.0f / std::sqrt(sum_lanes(sum) / float(n) + epsilon));
  each_vector(x, n, [&](Vec v, int64_t i, int count) { put(y + i, mul(mul(v, factor), part_of(weight + i, count)), count); });
}

// silu(v) = v / (1 + exp(-v)), with exp of negative numbers only.
void gate(const float* x, int64_t n, float* y) {
  const Vec one = splat(1.0f);
  each_vector(x, n, [&](Vec v, int64_t i, int count) {
    const Vec e = exp2(mul(abs(v), splat(-kLog2E)));
    const Vec silu = div(mul(v, where_less(v, zero(), e, one)), add(one, e));
    put(y + i, mul(silu, part_of(x + n + i, count)), count);
  });
}

// x float [32 * blocks] -> row `row`. A block with a number that is not finite gets a scale that is not, and so do all outputs.
void quantise_row(const float* x, const QuantisedRows& to, int64_t row) {
  for (int64_t b = 0; b < to.blocks; ++b) {
    const float* part = x + b * kBlock;
    const Vec first = load(part), second = load(part + 16);
    const float largest = max_lanes(max(abs(first), abs(second)));
    const float finite = sum_lanes(mul(add(first, second), zero()));  // 0, or not a number
    const int64_t i = row * to.blocks + b;
    to.scales[i] = largest / 127.0f + finite;
    to.sums[i] = store_bytes(to.q + i * kBlock, part, largest > 0.0f ? 127.0f / largest : 0.0f);
  }
}

template <int kBits, int kRows, class Scale>
inline void multiply_tile(const WeightTiles& w, int64_t tile, const QuantisedRows& x, int64_t row, const ProductOutput& out) {
  const uint8_t* codes = w.codes + tile * w.blocks * kBlock * kBits;
  const Scale* scales = static_cast<const Scale*>(w.scales) + tile * w.blocks * kTileRows;
  const int8_t* zeros = w.zeros + tile * w.blocks * kTileRows;
  const int8_t* q[kRows];
  const int64_t first = row * w.blocks;
  Eight sum[kRows];
  for (int r = 0; r < kRows; ++r) {
    q[r] = x.q + (first + r * w.blocks) * kBlock;
    sum[r] = eight_zeros();
  }
  for (int64_t b = 0; b < w.blocks; ++b) {
    Ints dot[kRows];
    block_dots<kBits, kRows>(codes, q, dot);
    const Eight scale = load_eight(scales);
    const Ints zero_points = load_zeros(zeros);
    for (int r = 0; r < kRows; ++r) {
      const int64_t i = first + r * w.blocks + b;
      sum[r] = add_block(sum[r], dot[r], zero_points, x.sums[i], scale, x.scales[i]);
      q[r] += kBlock;
    }
    codes += kBlock * kBits;
    scales += kTileRows;
    zeros += kTileRows;
  }
  const int64_t n = tile * kTileRows, count = w.rows - n < kTileRows ? w.rows - n : kTileRows;
  for (int r = 0; r < kRows; ++r) {
    const int64_t at = (row + r) * w.rows + n;
    if (count == kTileRows) {
      Eight y = sum[r];
      if (out.bias != nullptr) y = plus(y, load_eight(out.bias + n));
      if (out.residual != nullptr) y = plus(y, load_eight(out.residual + at));
      store_eight(out.y + at, y);
    } else {
      float part[kTileRows];
      store_eight(part, sum[r]);
      for (int64_t l = 0; l < count; ++l) {
        float y = part[l];
        if (out.bias != nullptr) y += out.bias[n + l];
        if (out.residual != nullptr) y += out.residual[at + l];
        out.y[at + l] = y;
      }
    }
  }
}

template <int kBits, class Scale>
void multiply_tiles(const WeightTiles& w, int64_t first, int64_t last, const QuantisedRows& x, int64_t row, int64_t end, const ProductOutput& out) {
  const int64_t groups = (end - row + kProductRows - 1) / kProductRows;
  for (int64_t tile = first; tile < last; ++tile)
    for (int64_t g = 0, at = row; g < groups; ++g) {
      const int64_t count = (end - at + groups - g - 1) / (groups - g);  // as even as can be: 7 rows are 4 and 3
      switch (count) {
        case 1: multiply_tile<kBits, 1, Scale>(w, tile, x, at, out); break;
        case 2: multiply_tile<kBits, 2, Scale>(w, tile, x, at, out); break;
        case 3: multiply_tile<kBits, 3, Scale>(w, tile, x, at, out); break;
        case 4: multiply_tile<kBits, 4, Scale>(w, tile, x, at, out); break;
        case 5: multiply_tile<kBits, 5, Scale>(w, tile, x, at, out); break;
        default: multiply_tile<kBits, kProductRows, Scale>(w, tile, x, at, out);
      }
      at += count;
    }
}

void multiply(const WeightTiles& w, int64_t first, int64_t last, const QuantisedRows& x, int64_t row, int64_t end, const ProductOutput& out) {
  const auto f = w.bits == 4 ? w.scale_bytes == 2 ? multiply_tiles<4, uint16_t> : multiply_tiles<4, float>
                             : w.scale_bytes == 2 ? multiply_tiles<8, uint16_t> : multiply_tiles<8, float>;
  f(w, first, last, x, row, end, out);
}

}  // namespace
}  // namespace edgekv
