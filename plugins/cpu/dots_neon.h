// Integer sums over a block of 32 columns for products.h: eight outputs in two NEON registers. See dots_scalar.h for what each means.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace {

struct Ints {
  int32x4_t a, b;
};
struct Eight {
  float32x4_t a, b;
};

inline Eight eight_zeros() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
inline Eight load_eight(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline Eight load_eight(const uint16_t* p) {
  const float16x8_t half = vreinterpretq_f16_u16(vld1q_u16(p));
  return {vcvt_f32_f16(vget_low_f16(half)), vcvt_high_f32_f16(half)};
}
inline Eight plus(Eight x, Eight y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
inline void store_eight(float* p, Eight x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
}
inline Ints load_zeros(const int8_t* p) {
  const int16x8_t wide = vmovl_s8(vld1_s8(p));
  return {vmovl_s16(vget_low_s16(wide)), vmovl_high_s16(wide)};
}

// Two outputs' four columns times the same four activations, twice.
inline int8x16_t four_columns(const int8_t* q) {
  int32_t bytes;
  std::memcpy(&bytes, q, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(bytes));
}

// Sums of products of outputs l, l + 1 in 16-bit lanes, four lanes each, to one 32-bit lane each.
inline int32x4_t per_output(int16x8_t first, int16x8_t second) { return vpaddq_s32(vpaddlq_s16(first), vpaddlq_s16(second)); }

template <int kBits, int kRows>
inline void block_dots(const uint8_t* codes, const int8_t* const (&q)[kRows], Ints (&dot)[kRows]) {
  if constexpr (kBits == 4) {
    // Eight products of at most 15 * 127 fit 16 bits.
    int16x8_t sum[kRows][4];
    for (int j = 0; j < 4; ++j) {
      for (int half = 0; half < 2; ++half) {
        const uint8x16_t line = vld1q_u8(codes + 32 * j + 16 * half);
        const int8x16_t first = vreinterpretq_s8_u8(vandq_u8(line, vdupq_n_u8(15))), second = vreinterpretq_s8_u8(vshrq_n_u8(line, 4));
        for (int r = 0; r < kRows; ++r) {
          const int8x16_t a = four_columns(q[r] + 8 * j), b = four_columns(q[r] + 8 * j + 4);
          int16x8_t low = vmull_s8(vget_low_s8(first), vget_low_s8(a)), high = vmull_high_s8(first, a);
          low = vmlal_s8(low, vget_low_s8(second), vget_low_s8(b));
          high = vmlal_high_s8(high, second, b);
          sum[r][2 * half] = j == 0 ? low : vaddq_s16(sum[r][2 * half], low);
          sum[r][2 * half + 1] = j == 0 ? high : vaddq_s16(sum[r][2 * half + 1], high);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) dot[r] = {per_output(sum[r][0], sum[r][1]), per_output(sum[r][2], sum[r][3])};
  } else {
    for (int j = 0; j < 8; ++j) {
      const int8x16_t first = vreinterpretq_s8_u8(vld1q_u8(codes + 32 * j)), second = vreinterpretq_s8_u8(vld1q_u8(codes + 32 * j + 16));
      for (int r = 0; r < kRows; ++r) {
        const int8x16_t a = four_columns(q[r] + 4 * j);
        const int32x4_t low = per_output(vmull_s8(vget_low_s8(first), vget_low_s8(a)), vmull_high_s8(first, a));
        const int32x4_t high = per_output(vmull_s8(vget_low_s8(second), vget_low_s8(a)), vmull_high_s8(second, a));
        dot[r] = j == 0 ? Ints{low, high} : Ints{vaddq_s32(dot[r].a, low), vaddq_s32(dot[r].b, high)};
      }
    }
  }
}

inline Eight add_block(Eight sum, Ints dot, Ints zeros, uint32_t q_sum, Eight scales, float x_scale) {
  const int32x4_t s = vdupq_n_s32(int16_t(q_sum));
  const float32x4_t f = vdupq_n_f32(x_scale);
  return {vfmaq_f32(sum.a, vcvtq_f32_s32(vmlsq_s32(dot.a, zeros.a, s)), vmulq_f32(scales.a, f)),
          vfmaq_f32(sum.b, vcvtq_f32_s32(vmlsq_s32(dot.b, zeros.b, s)), vmulq_f32(scales.b, f))};
}

inline uint32_t store_bytes(int8_t* q, const float* x, float factor) {
  int32_t sum = 0;
  for (int i = 0; i < 32; i += 8) {
    const int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i), factor)), high = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i + 4), factor));
    const int8x8_t bytes = vqmovn_s16(vcombine_s16(vqmovn_s32(low), vqmovn_s32(high)));
    vst1_s8(q + i, bytes);
    sum += vaddlv_s8(bytes);
  }
  return uint16_t(sum);
}

}  // namespace
