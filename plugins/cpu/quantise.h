// Groups of 32 numbers as 2, 4 or 8-bit codes with a zero point and a scale in fp16 (docs/self_index.md). The order of additions
// is NumPy's for 32 numbers in a row, so that codes and pairs equal the oracle's bit for bit on every machine; the loops are plain
// and have no dependencies between numbers, which is all a compiler needs to vectorise them.
#pragma once
#include "cpu/simd_scalar.h"
#include "layout/state_layout.h"

namespace edgekv {
namespace {

// Sum of 32 numbers: eight running sums, folded as a tree.
inline float sum_of_group(const float* x) {
  float r[8];
  for (int i = 0; i < 8; ++i) r[i] = x[i];
  for (int at = 8; at < EDGEKV_GROUP; at += 8)
    for (int i = 0; i < 8; ++i) r[i] += x[at + i];
  return ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
}

// codes = clamp(rint((y - zero) / scale), 0, levels), all 0 for scale 0. Clamped first, so that rounding by a large constant is exact.
inline void nearest_codes(const float* y, float zero, float scale, float levels, float* codes) {
  const float divisor = scale > 0 ? scale : 1.0f, most = scale > 0 ? levels : 0.0f;
  for (int i = 0; i < EDGEKV_GROUP; ++i) {
    float x = (y[i] - zero) / divisor;
    x = x > 0.0f ? x : 0.0f;
    x = x < most ? x : most;
    codes[i] = (x + 12582912.0f) - 12582912.0f;
  }
}

// Quantises one group: codes[32] as whole numbers, pair[2] = zero point and scale in fp16.
inline void quantise_group(const float* y, int bits, float* codes, uint16_t* pair) {
  const float levels = float((1 << bits) - 1);
  float least = y[0], most = y[0];
  for (int i = 1; i < EDGEKV_GROUP; ++i) {
    least = y[i] < least ? y[i] : least;
    most = y[i] > most ? y[i] : most;
  }
  nearest_codes(y, least, (most - least) / levels, levels, codes);
  const float middle = sum_of_group(codes) / EDGEKV_GROUP;
  float squares[EDGEKV_GROUP], products[EDGEKV_GROUP];
  for (int i = 0; i < EDGEKV_GROUP; ++i) {
    const float centred = codes[i] - middle;
    squares[i] = centred * centred;
    products[i] = centred * y[i];
  }
  const float spread = sum_of_group(squares);
  float zero = least, scale = 0.0f;
  if (spread > 0) {
    scale = sum_of_group(products) / spread;
    zero = sum_of_group(y) / EDGEKV_GROUP - scale * middle;
  }
  pair[0] = to_half(zero);
  pair[1] = to_half(scale);
  nearest_codes(y, from_half(pair[0]), from_half(pair[1]), levels, codes);
}

// Scales a group's pair such that the stored numbers s keep y . s = y . y (docs/self_index.md says why keys need that).
inline void make_unbiased(const float* y, const float* codes, uint16_t* pair) {
  const float zero = from_half(pair[0]), scale = from_half(pair[1]);
  float squares[EDGEKV_GROUP], products[EDGEKV_GROUP];
  for (int i = 0; i < EDGEKV_GROUP; ++i) {
    squares[i] = y[i] * y[i];
    const float step = scale * codes[i];
    products[i] = y[i] * (zero + step);
  }
  const float product = sum_of_group(products);
  const float factor = product > 0 ? sum_of_group(squares) / product : 1.0f;
  pair[0] = to_half(zero * factor);
  pair[1] = to_half(scale * factor);
}

// Codes and pairs of dim numbers: to packed (4 * bits bytes per group) and pairs. The last group repeats its last number.
inline void quantise(const float* x, int dim, int bits, bool unbiased, uint8_t* packed, uint8_t* pairs) {
  const int per_byte = 8 / bits, bytes = 4 * bits;
  for (int first = 0; first < dim; first += EDGEKV_GROUP, packed += bytes, pairs += 4) {
    float y[EDGEKV_GROUP], codes[EDGEKV_GROUP];
    for (int i = 0; i < EDGEKV_GROUP; ++i) y[i] = x[first + i < dim ? first + i : dim - 1];
    uint16_t pair[2];
    quantise_group(y, bits, codes, pair);
    if (unbiased) make_unbiased(y, codes, pair);
    std::memcpy(pairs, pair, 4);
    for (int j = 0; j < bytes; ++j) {
      unsigned byte = 0;
      for (int i = 0; i < per_byte; ++i) byte |= unsigned(int(codes[i * bytes + j])) << (bits * i);
      packed[j] = uint8_t(byte);
    }
  }
}

// Inverse: dim numbers.
inline void dequantise(const uint8_t* packed, const uint8_t* pairs, int dim, int bits, float* x) {
  const int bytes = 4 * bits;
  for (int d = 0; d < dim; ++d) {
    const int group = d / EDGEKV_GROUP, i = d % EDGEKV_GROUP;
    uint16_t pair[2];
    std::memcpy(pair, pairs + 4 * group, 4);
    const int code = packed[group * bytes + i % bytes] >> (bits * (i / bytes)) & ((1 << bits) - 1);
    x[d] = from_half(pair[0]) + from_half(pair[1]) * float(code);
  }
}

// The orthogonal Walsh-Hadamard transform in place, in blocks of the largest power of two that divides dim. factor is
// 1 / sqrt(block), rounded to float.
inline void transform(float* x, int dim, int block, float factor) {
  for (int half = 1; half < block; half *= 2)
    for (int at = 0; at < dim; at += 2 * half)
      for (int i = at; i < at + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
  for (int i = 0; i < dim; ++i) x[i] *= factor;
}

}  // namespace
}  // namespace edgekv
