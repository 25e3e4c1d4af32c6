// Integer sums over a block of 32 columns for products.h, eight outputs at a time, in plain C++: what the other dots_*.h compute.
#pragma once
#include <cmath>
#include <cstdint>

namespace {

struct Ints {
  int32_t v[8];
};
struct Eight {
  float v[8];
};

inline Eight eight_zeros() { return {}; }
inline Eight load_eight(const float* p) {
  Eight x;
  for (int l = 0; l < 8; ++l) x.v[l] = p[l];
  return x;
}
inline Eight load_eight(const uint16_t* p) {
  Eight x;
  for (int l = 0; l < 8; ++l) x.v[l] = from_half(p[l]);
  return x;
}
inline Eight plus(Eight x, Eight y) {
  for (int l = 0; l < 8; ++l) x.v[l] += y.v[l];
  return x;
}
inline void store_eight(float* p, Eight x) {
  for (int l = 0; l < 8; ++l) p[l] = x.v[l];
}
inline Ints load_zeros(const int8_t* p) {
  Ints x;
  for (int l = 0; l < 8; ++l) x.v[l] = p[l];
  return x;
}

// dot[r] of output l: sum over the block of code times q[r], codes as a tile of weights.h holds them.
template <int kBits, int kRows>
inline void block_dots(const uint8_t* codes, const int8_t* const (&q)[kRows], Ints (&dot)[kRows]) {
  for (int r = 0; r < kRows; ++r)
    for (int l = 0; l < 8; ++l) {
      int32_t sum = 0;
      for (int j = 0; j < kBits; ++j)
        for (int i = 0; i < 4; ++i) {
          const uint8_t byte = codes[32 * j + 4 * l + i];
          if (kBits == 4)
            sum += (byte & 15) * q[r][8 * j + i] + (byte >> 4) * q[r][8 * j + 4 + i];
          else
            sum += int8_t(byte) * q[r][4 * j + i];
        }
      dot[r].v[l] = sum;
    }
}

// sum + (dot - zero * sum of q) * (weight scale * activation scale), the last by one rounded multiply-add.
inline Eight add_block(Eight sum, Ints dot, Ints zeros, uint32_t q_sum, Eight scales, float x_scale) {
  for (int l = 0; l < 8; ++l) sum.v[l] = std::fma(float(dot.v[l] - zeros.v[l] * int16_t(q_sum)), scales.v[l] * x_scale, sum.v[l]);
  return sum;
}

// Rounds 32 numbers x * factor to the nearest whole ones, ties to even; returns their sum as QuantisedRows holds it.
inline uint32_t store_bytes(int8_t* q, const float* x, float factor) {
  int32_t sum = 0;
  for (int i = 0; i < 32; ++i) {
    const float whole = std::nearbyint(x[i] * factor);
    q[i] = whole >= -127.0f && whole <= 127.0f ? int8_t(whole) : int8_t(0);  // not a number: the block's scale says so
    sum += q[i];
  }
  return uint16_t(sum);
}

}  // namespace
