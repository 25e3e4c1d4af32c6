// Sixteen floats in plain C++: always there, and the definition of what the other simd_*.h files do.
//
// A product is not fused into a sum here, so this one differs from the others in the last bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct Vec {
  float x[16];
};

constexpr int kRowBlock = 4;      // query rows that share the loads of keys and values
constexpr int kAccumulators = 4;  // vectors of running sums that a kernel keeps at once

template <class F>
inline Vec each(F f) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.x[i] = f(i);
  return r;
}

// IEEE half precision from and to float, rounding to nearest even; keeps infinities and NaN.
inline float from_half(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff;
  uint32_t bits;
  if (magnitude >= 0x7c00) {
    bits = 0x7f800000 | (magnitude & 0x3ff) << 13;
  } else if (magnitude >= 0x400) {
    bits = (magnitude << 13) + (112u << 23);
  } else {
    const float f = float(magnitude) * (1.0f / 16777216.0f);  // subnormal: units of 2^-24
    std::memcpy(&bits, &f, 4);
  }
  bits |= sign;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline uint16_t to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return uint16_t(sign | 0x7e00 | (bits >> 13 & 0x3ff));
  if (bits >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds beyond 65504
  if (bits < 0x38800000) {                                   // below 2^-14: adding 0.5 leaves the rounded units of 2^-24 in the low bits
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  return uint16_t(sign | ((bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13));
}

inline Vec splat(float x) {
  return each([&](int) { return x; });
}
inline Vec zero() { return splat(0.0f); }
// x in lane 0, zero in the others.
inline Vec first_lane(float x) {
  return each([&](int i) { return i == 0 ? x : 0.0f; });
}
inline Vec load(const float* p) {
  return each([&](int i) { return p[i]; });
}
inline Vec load(const uint16_t* p) {
  return each([&](int i) { return from_half(p[i]); });
}
inline void store(float* p, const Vec& a) { std::memcpy(p, a.x, sizeof(a.x)); }
inline void store(uint16_t* p, const Vec& a) {
  for (int i = 0; i < 16; ++i) p[i] = to_half(a.x[i]);
}
// The first n lanes; the others are 0, and memory beyond p[n - 1] is not touched.
template <class T>
inline Vec load_first(const T* p, int n) {
  T whole[16] = {};
  std::memcpy(whole, p, size_t(n) * sizeof(T));
  return load(whole);
}
template <class T>
inline void store_first(T* p, const Vec& a, int n) {
  T whole[16];
  store(whole, a);
  std::memcpy(p, whole, size_t(n) * sizeof(T));
}

inline Vec add(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.x[i] + b.x[i]; });
}
inline Vec sub(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.x[i] - b.x[i]; });
}
inline Vec mul(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.x[i] * b.x[i]; });
}
inline Vec div(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.x[i] / b.x[i]; });
}
// a * b + c
inline Vec fma(const Vec& a, const Vec& b, const Vec& c) {
  return each([&](int i) { return a.x[i] * b.x[i] + c.x[i]; });
}
// When one is NaN the result is b, so that max(limit, x) keeps a NaN in x.
inline Vec max(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
}
inline Vec min(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; });
}
inline Vec abs(const Vec& a) {
  return each([&](int i) { return std::fabs(a.x[i]); });
}
// The nearest integer, ties to even, for |a| < 2^22.
inline Vec nearest(const Vec& a) {
  return each([&](int i) { return (a.x[i] + 12582912.0f) - 12582912.0f; });
}
// a * 2^n for a normal a and an integer n such that the result is normal.
inline Vec times_power_of_two(const Vec& a, const Vec& n) {
  return each([&](int i) {
    int32_t bits;
    std::memcpy(&bits, &a.x[i], 4);
    // NaN reaches this from bad activations: any result will do, but the conversion to int must be defined.
    bits += (n.x[i] == n.x[i] ? int32_t(n.x[i]) : 0) * (1 << 23);
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  });
}
// Lane by lane: a < b ? yes : no.
inline Vec where_less(const Vec& a, const Vec& b, const Vec& yes, const Vec& no) {
  return each([&](int i) { return a.x[i] < b.x[i] ? yes.x[i] : no.x[i]; });
}
// Lanes begin .. end-1 of a, the other lanes of `other`.
inline Vec keep_lanes(const Vec& a, int begin, int end, const Vec& other) {
  return each([&](int i) { return i >= begin && i < end ? a.x[i] : other.x[i]; });
}

// Both fold the upper half onto the lower one until one lane is left, in every instruction set.
inline float sum_lanes(Vec a) {
  for (int n = 8; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) a.x[i] += a.x[i + n];
  return a.x[0];
}
inline float max_lanes(Vec a) {
  for (int n = 8; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) a.x[i] = a.x[i] > a.x[i + n] ? a.x[i] : a.x[i + n];
  return a.x[0];
}


// Lane i gets what lane i ^ kDistance holds; kDistance is 1, 2, 4 or 8.
template <int kDistance>
inline Vec swap_lanes(const Vec& a) {
  return each([&](int i) { return a.x[i ^ kDistance]; });
}
// 32 codes of kBits (2, 4 or 8) as numbers: bits kBits i .. of byte j of the 4 kBits bytes are number 4 kBits i + j.
template <int kBits>
inline void unpack(const uint8_t* p, Vec out[2]) {
  for (int n = 0; n < 32; ++n) out[n / 16].x[n % 16] = float(p[n % (4 * kBits)] >> (n / (4 * kBits) * kBits) & ((1 << kBits) - 1));
}
// Changes the sign of lane i where bit i of `positive` is 0.
inline Vec with_signs(const Vec& a, uint32_t positive) {
  return each([&](int i) { return positive >> i & 1 ? a.x[i] : -a.x[i]; });
}
// Lane i gets the sum of the lanes of x[i].
inline Vec sum_each(const Vec x[16]) {
  return each([&](int i) { return sum_lanes(x[i]); });
}
// Lane j of x[i] becomes lane i of x[j].
inline void transpose(Vec x[16]) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < i; ++j) {
      const float f = x[i].x[j];
      x[i].x[j] = x[j].x[i];
      x[j].x[i] = f;
    }
}

// 32 codes of 2 bits as zero_point + scale * code.
inline void levels(const uint8_t* p, Vec zero_point, Vec scale, Vec out[2]) {
  unpack<2>(p, out);
  for (int i = 0; i < 2; ++i) out[i] = fma(out[i], scale, zero_point);
}

}  // namespace
