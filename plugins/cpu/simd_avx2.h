// Sixteen floats in two AVX2 registers. See simd_scalar.h for what each operation means.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct Vec {
  __m256 a, b;
};

constexpr int kRowBlock = 6;      // query rows per register block
constexpr int kAccumulators = 5;  // pairs of the 16 registers; with 6, three rows of two vectors spill one and run at half the speed

inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec first_lane(float x) { return {_mm256_zextps128_ps256(_mm_set_ss(x)), _mm256_setzero_ps()}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Vec load(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline void store(float* p, Vec x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline void store(uint16_t* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
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

inline Vec add(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Vec sub(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Vec mul(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Vec div(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Vec fma(Vec x, Vec y, Vec z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline Vec max(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Vec min(Vec x, Vec y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Vec abs(Vec x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline Vec nearest(Vec x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline Vec times_power_of_two(Vec x, Vec n) {
  auto half = [](__m256 f, __m256 e) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(f), _mm256_slli_epi32(_mm256_cvtps_epi32(e), 23)));
  };
  return {half(x.a, n.a), half(x.b, n.b)};
}
inline Vec where_less(Vec x, Vec y, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
inline Vec keep_lanes(Vec x, int begin, int end, Vec other) {
  const __m256i first = _mm256_set1_epi32(begin), last = _mm256_set1_epi32(end);
  auto half = [&](__m256 f, __m256 o, __m256i lane) {
    const __m256i outside = _mm256_or_si256(_mm256_cmpgt_epi32(first, lane), _mm256_cmpgt_epi32(lane, _mm256_sub_epi32(last, _mm256_set1_epi32(1))));
    return _mm256_blendv_ps(f, o, _mm256_castsi256_ps(outside));
  };
  return {half(x.a, other.a, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)), half(x.b, other.b, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}

inline float sum_lanes(Vec x) {
  const __m256 b = _mm256_add_ps(x.a, x.b);
  const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
inline float max_lanes(Vec x) {
  const __m256 b = _mm256_max_ps(x.a, x.b);
  const __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}


template <int kDistance>
inline Vec swap_lanes(Vec x) {
  if constexpr (kDistance == 8) return {x.b, x.a};
  auto half = [](__m256 f) {
    if constexpr (kDistance == 1) return _mm256_permute_ps(f, 0xB1);
    if constexpr (kDistance == 2) return _mm256_permute_ps(f, 0x4E);
    return _mm256_permute2f128_ps(f, f, 1);
  };
  return {half(x.a), half(x.b)};
}
template <int kBits>
inline void unpack(const uint8_t* p, Vec out[2]) {
  auto eight = [](const uint8_t* at) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))); };
  auto numbers = [](__m256i bytes, int shift) {
    const __m256i codes = _mm256_and_si256(_mm256_srl_epi32(bytes, _mm_cvtsi32_si128(shift)), _mm256_set1_epi32((1 << kBits) - 1));
    return _mm256_cvtepi32_ps(codes);
  };
  for (int i = 0; i < 4; ++i) {  // numbers 8i .. 8i + 7
    const __m256 eighth = numbers(eight(p + 8 * i % (4 * kBits)), 8 * i / (4 * kBits) * kBits);
    (i % 2 ? out[i / 2].b : out[i / 2].a) = eighth;
  }
}
inline Vec with_signs(Vec x, uint32_t positive) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), sign = _mm256_set1_epi32(int32_t(0x80000000));
  auto half = [&](__m256 f, uint32_t bits) {
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int32_t(bits)), bit), bit);
    return _mm256_xor_ps(f, _mm256_castsi256_ps(_mm256_andnot_si256(set, sign)));
  };
  return {half(x.a, positive), half(x.b, positive >> 8)};
}
inline Vec sum_each(const Vec x[16]) {
  auto eight = [](const Vec* v) {
    __m256 s[4];
    for (int i = 0; i < 4; ++i)
      s[i] = _mm256_hadd_ps(_mm256_add_ps(v[2 * i].a, v[2 * i].b), _mm256_add_ps(v[2 * i + 1].a, v[2 * i + 1].b));
    const __m256 p = _mm256_hadd_ps(s[0], s[1]), q = _mm256_hadd_ps(s[2], s[3]);
    return _mm256_add_ps(_mm256_permute2f128_ps(p, q, 0x20), _mm256_permute2f128_ps(p, q, 0x31));
  };
  return {eight(x), eight(x + 8)};
}
inline void transpose(Vec x[16]) {
  auto block = [](__m256 r[8]) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
      a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
      a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      for (int n = 0; n < 2; ++n) {
        b[i + 2 * n] = _mm256_shuffle_ps(a[i + n], a[i + 2 + n], 0x44);
        b[i + 2 * n + 1] = _mm256_shuffle_ps(a[i + n], a[i + 2 + n], 0xEE);
      }
    }
    for (int n = 0; n < 4; ++n) {
      r[n] = _mm256_permute2f128_ps(b[n], b[4 + n], 0x20);
      r[4 + n] = _mm256_permute2f128_ps(b[n], b[4 + n], 0x31);
    }
  };
  __m256 parts[4][8];  // upper left, upper right, lower left, lower right
  for (int i = 0; i < 16; ++i) parts[i / 8 * 2][i % 8] = x[i].a, parts[i / 8 * 2 + 1][i % 8] = x[i].b;
  for (auto& part : parts) block(part);
  for (int i = 0; i < 16; ++i) x[i] = {parts[i / 8][i % 8], parts[i / 8 + 2][i % 8]};
}

// A look-up of 8 numbers takes the low 3 bits of each index: the code and, in the uppermost, a bit that must not matter.
inline void levels(const uint8_t* p, Vec zero_point, Vec scale, Vec out[2]) {
  const __m256 level = _mm256_fmadd_ps(_mm256_setr_ps(0, 1, 2, 3, 0, 1, 2, 3), scale.a, zero_point.a);
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  out[0] = {_mm256_permutevar8x32_ps(level, bytes), _mm256_permutevar8x32_ps(level, _mm256_srli_epi32(bytes, 2))};
  out[1] = {_mm256_permutevar8x32_ps(level, _mm256_srli_epi32(bytes, 4)), _mm256_permutevar8x32_ps(level, _mm256_srli_epi32(bytes, 6))};
}

}  // namespace
