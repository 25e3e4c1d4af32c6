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

}  // namespace
