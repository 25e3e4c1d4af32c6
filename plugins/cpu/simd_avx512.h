// Sixteen floats in one AVX-512 register. See simd_scalar.h for what each operation means.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct Vec {
  __m512 v;
};

constexpr int kRowBlock = 12;      // query rows per register block
constexpr int kAccumulators = 24;  // of 32 registers

inline __mmask16 first_lanes(int n) { return __mmask16(n >= 16 ? 0xffff : (1u << n) - 1); }

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec splat(float x) { return {_mm512_set1_ps(x)}; }
inline Vec first_lane(float x) { return {_mm512_zextps128_ps512(_mm_set_ss(x))}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline Vec load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline Vec load_first(const uint16_t* p, int n) { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p))}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void store(uint16_t* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_first(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
inline void store_first(uint16_t* p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
inline Vec nearest(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec times_power_of_two(Vec a, Vec n) {
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(_mm512_cvtps_epi32(n.v), 23)))};
}
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline Vec keep_lanes(Vec a, int begin, int end, Vec other) {
  const __mmask16 kept = __mmask16(first_lanes(end < 0 ? 0 : end) & ~first_lanes(begin < 0 ? 0 : begin));
  return {_mm512_mask_blend_ps(kept, other.v, a.v)};
}

inline float sum_lanes(Vec a) {
  const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
inline float max_lanes(Vec a) {
  const __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}


template <int kDistance>
inline Vec swap_lanes(Vec a) {
  if constexpr (kDistance == 1) return {_mm512_permute_ps(a.v, 0xB1)};
  if constexpr (kDistance == 2) return {_mm512_permute_ps(a.v, 0x4E)};
  return {_mm512_shuffle_f32x4(a.v, a.v, kDistance == 4 ? 0xB1 : 0x4E)};
}
template <int kBits>
inline void unpack(const uint8_t* p, Vec out[2]) {
  auto numbers = [](__m512i x) { return Vec{_mm512_cvtepi32_ps(x)}; };
  if constexpr (kBits == 2) {
    const __m512i low = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(2), 1), three = _mm512_set1_epi32(3);
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_set1_epi64x(*reinterpret_cast<const __attribute__((may_alias)) int64_t*>(p)));
    const __m512i first = _mm512_srlv_epi32(bytes, low);
    out[0] = numbers(_mm512_and_si512(first, three));
    out[1] = numbers(_mm512_and_si512(_mm512_srli_epi32(first, 4), three));
  } else if constexpr (kBits == 4) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    out[0] = numbers(_mm512_and_si512(bytes, _mm512_set1_epi32(15)));
    out[1] = numbers(_mm512_srli_epi32(bytes, 4));
  } else {
    for (int i = 0; i < 2; ++i) out[i] = numbers(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i))));
  }
}
inline Vec with_signs(Vec a, uint32_t positive) {
  return {_mm512_mask_xor_ps(a.v, __mmask16(~positive), a.v, _mm512_set1_ps(-0.0f))};
}
inline Vec sum_each(const Vec x[16]) {
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i)
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i].v, x[2 * i + 1].v), _mm512_unpackhi_ps(x[2 * i].v, x[2 * i + 1].v));
  for (int i = 0; i < 4; ++i) {
    const __m512d p = _mm512_castps_pd(a[2 * i]), q = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
  }
  auto fold = [](__m512 p, __m512 q) { return _mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x88), _mm512_shuffle_f32x4(p, q, 0xDD)); };
  for (int i = 0; i < 2; ++i) c[i] = fold(b[2 * i], b[2 * i + 1]);
  return {fold(c[0], c[1])};
}
inline void transpose(Vec x[16]) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(x[i].v, x[i + 1].v);
    a[i + 1] = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
  }
  for (int i = 0; i < 16; i += 4) {  // b[i + n]: number n of each quarter of rows i .. i + 3
    for (int n = 0; n < 2; ++n) {
      const __m512d p = _mm512_castps_pd(a[i + n]), q = _mm512_castps_pd(a[i + 2 + n]);
      b[i + 2 * n] = _mm512_castpd_ps(_mm512_unpacklo_pd(p, q));
      b[i + 2 * n + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(p, q));
    }
  }
  for (int n = 0; n < 4; ++n) {
    const __m512 p = _mm512_shuffle_f32x4(b[n], b[4 + n], 0x88), q = _mm512_shuffle_f32x4(b[8 + n], b[12 + n], 0x88);
    const __m512 r = _mm512_shuffle_f32x4(b[n], b[4 + n], 0xDD), s = _mm512_shuffle_f32x4(b[8 + n], b[12 + n], 0xDD);
    x[n].v = _mm512_shuffle_f32x4(p, q, 0x88);
    x[8 + n].v = _mm512_shuffle_f32x4(p, q, 0xDD);
    x[4 + n].v = _mm512_shuffle_f32x4(r, s, 0x88);
    x[12 + n].v = _mm512_shuffle_f32x4(r, s, 0xDD);
  }
}

// A look-up of 16 numbers takes the low 4 bits of each index: the code and, in the upper two, another one, which must not matter.
inline void levels(const uint8_t* p, Vec zero_point, Vec scale, Vec out[2]) {
  const __m512i low = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(2), 1);
  const __m512 four = _mm512_broadcast_f32x4(_mm_setr_ps(0, 1, 2, 3)), level = _mm512_fmadd_ps(four, scale.v, zero_point.v);
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_set1_epi64x(*reinterpret_cast<const __attribute__((may_alias)) int64_t*>(p)));
  const __m512i first = _mm512_srlv_epi32(bytes, low);
  out[0].v = _mm512_permutexvar_ps(first, level);
  out[1].v = _mm512_permutexvar_ps(_mm512_srli_epi32(first, 4), level);
}

}  // namespace
