// Sixteen floats in four NEON registers. See simd_scalar.h for what each operation means.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace {

struct Vec {
  float32x4_t q[4];
};

constexpr int kRowBlock = 6;      // query rows per register block
constexpr int kAccumulators = 5;  // quadruples of the 32 registers; with 6, three rows of two vectors spill one

template <class F>
inline Vec each(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}

inline Vec splat(float x) {
  return each([&](int) { return vdupq_n_f32(x); });
}
inline Vec zero() { return splat(0.0f); }
inline Vec first_lane(float x) {
  return each([&](int i) { return vsetq_lane_f32(i == 0 ? x : 0.0f, vdupq_n_f32(0.0f), 0); });
}
inline Vec load(const float* p) {
  return each([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline Vec load(const uint16_t* p) {
  return each([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline void store(float* p, Vec x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.q[i]);
}
inline void store(uint16_t* p, Vec x) {
  for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.q[i])));
}
template <class T>
inline Vec load_first(const T* p, int n) {
  T whole[16] = {};
  std::memcpy(whole, p, size_t(n) * sizeof(T));
  return load(whole);
}
template <class T>
inline void store_first(T* p, Vec x, int n) {
  T whole[16];
  store(whole, x);
  std::memcpy(p, whole, size_t(n) * sizeof(T));
}

inline Vec add(Vec x, Vec y) {
  return each([&](int i) { return vaddq_f32(x.q[i], y.q[i]); });
}
inline Vec sub(Vec x, Vec y) {
  return each([&](int i) { return vsubq_f32(x.q[i], y.q[i]); });
}
inline Vec mul(Vec x, Vec y) {
  return each([&](int i) { return vmulq_f32(x.q[i], y.q[i]); });
}
inline Vec div(Vec x, Vec y) {
  return each([&](int i) { return vdivq_f32(x.q[i], y.q[i]); });
}
inline Vec fma(Vec x, Vec y, Vec z) {
  return each([&](int i) { return vfmaq_f32(z.q[i], x.q[i], y.q[i]); });
}
inline Vec max(Vec x, Vec y) {
  return each([&](int i) { return vmaxq_f32(x.q[i], y.q[i]); });
}
inline Vec min(Vec x, Vec y) {
  return each([&](int i) { return vminq_f32(x.q[i], y.q[i]); });
}
inline Vec abs(Vec x) {
  return each([&](int i) { return vabsq_f32(x.q[i]); });
}
inline Vec nearest(Vec x) {
  return each([&](int i) { return vrndnq_f32(x.q[i]); });
}
inline Vec times_power_of_two(Vec x, Vec n) {
  return each([&](int i) {
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x.q[i]), vshlq_n_s32(vcvtnq_s32_f32(n.q[i]), 23)));
  });
}
inline Vec where_less(Vec x, Vec y, Vec yes, Vec no) {
  return each([&](int i) { return vbslq_f32(vcltq_f32(x.q[i], y.q[i]), yes.q[i], no.q[i]); });
}
inline Vec keep_lanes(Vec x, int begin, int end, Vec other) {
  static const int32_t four[4] = {0, 1, 2, 3};
  return each([&](int i) {
    const int32x4_t lane = vaddq_s32(vld1q_s32(four), vdupq_n_s32(4 * i));
    const uint32x4_t kept = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(begin)), vcltq_s32(lane, vdupq_n_s32(end)));
    return vbslq_f32(kept, x.q[i], other.q[i]);
  });
}

inline float sum_lanes(Vec x) {
  const float32x4_t c = vaddq_f32(vaddq_f32(x.q[0], x.q[2]), vaddq_f32(x.q[1], x.q[3]));
  const float32x2_t d = vadd_f32(vget_low_f32(c), vget_high_f32(c));
  return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}
inline float max_lanes(Vec x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.q[0], x.q[2]), vmaxq_f32(x.q[1], x.q[3]))); }


template <int kDistance>
inline Vec swap_lanes(Vec x) {
  return each([&](int i) {
    if constexpr (kDistance == 1) return vrev64q_f32(x.q[i]);
    if constexpr (kDistance == 2) return vextq_f32(x.q[i], x.q[i], 2);
    return x.q[i ^ (kDistance / 4)];
  });
}
template <int kBits>
inline void unpack(const uint8_t* p, Vec out[2]) {
  for (int i = 0; i < 4; ++i) {  // numbers 8i .. 8i + 7
    const int8x8_t shift = vdup_n_s8(int8_t(-(8 * i / (4 * kBits) * kBits)));
    const uint8x8_t codes = vand_u8(vshl_u8(vld1_u8(p + 8 * i % (4 * kBits)), shift), vdup_n_u8(uint8_t((1 << kBits) - 1)));
    const uint16x8_t wide = vmovl_u8(codes);
    out[i / 2].q[i % 2 * 2] = vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
    out[i / 2].q[i % 2 * 2 + 1] = vcvtq_f32_u32(vmovl_u16(vget_high_u16(wide)));
  }
}
inline Vec with_signs(Vec x, uint32_t positive) {
  static const uint32_t four[4] = {1, 2, 4, 8};
  const uint32x4_t bit = vld1q_u32(four);
  return each([&](int i) {
    const uint32x4_t set = vtstq_u32(vdupq_n_u32(positive >> 4 * i), bit);
    return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(x.q[i]), vbicq_u32(vdupq_n_u32(0x80000000u), set)));
  });
}
inline Vec sum_each(const Vec x[16]) {
  auto one = [&](int i) { return vaddq_f32(vaddq_f32(x[i].q[0], x[i].q[2]), vaddq_f32(x[i].q[1], x[i].q[3])); };
  return each([&](int i) { return vpaddq_f32(vpaddq_f32(one(4 * i), one(4 * i + 1)), vpaddq_f32(one(4 * i + 2), one(4 * i + 3))); });
}
inline void transpose(Vec x[16]) {
  Vec y[16];
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) {  // rows 4i .. 4i + 3, numbers 4j .. 4j + 3
      const float32x4x2_t a = vtrnq_f32(x[4 * i].q[j], x[4 * i + 1].q[j]), b = vtrnq_f32(x[4 * i + 2].q[j], x[4 * i + 3].q[j]);
      for (int n = 0; n < 2; ++n) {
        y[4 * j + n].q[i] = vcombine_f32(vget_low_f32(a.val[n]), vget_low_f32(b.val[n]));
        y[4 * j + 2 + n].q[i] = vcombine_f32(vget_high_f32(a.val[n]), vget_high_f32(b.val[n]));
      }
    }
  }
  for (int i = 0; i < 16; ++i) x[i] = y[i];
}

inline void levels(const uint8_t* p, Vec zero_point, Vec scale, Vec out[2]) {
  unpack<2>(p, out);
  for (int i = 0; i < 2; ++i) out[i] = fma(out[i], scale, zero_point);
}

}  // namespace
