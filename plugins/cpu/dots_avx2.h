// Integer sums over a block of 32 columns for products.h: eight outputs in one AVX2 register. See dots_scalar.h for what each means.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct Ints {
  __m256i v;
};
struct Eight {
  __m256 v;
};

inline Eight eight_zeros() { return {_mm256_setzero_ps()}; }
inline Eight load_eight(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Eight load_eight(const uint16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline Eight plus(Eight x, Eight y) { return {_mm256_add_ps(x.v, y.v)}; }
inline void store_eight(float* p, Eight x) { _mm256_storeu_ps(p, x.v); }
inline Ints load_zeros(const int8_t* p) { return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))}; }

inline __m256i four_columns(const int8_t* q) {
  int32_t bytes;
  std::memcpy(&bytes, q, 4);
  return _mm256_set1_epi32(bytes);
}

// Keeps a running sum where it is: left alone, the compiler collects all terms of an unrolled loop first and runs out of registers.
inline void now(__m256i& sum) { asm("" : "+x"(sum)); }

template <int kBits, int kRows>
inline void block_dots(const uint8_t* codes, const int8_t* const (&q)[kRows], Ints (&dot)[kRows]) {
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (kBits == 4) {
    // Sixteen products of at most 15 * 127 fit 16 bits.
    const __m256i low = _mm256_set1_epi8(15);
    __m256i pairs[kRows];
    for (int j = 0; j < 4; ++j) {
      const __m256i line = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * j));
      const __m256i first = _mm256_and_si256(line, low), second = _mm256_and_si256(_mm256_srli_epi16(line, 4), low);
      for (int r = 0; r < kRows; ++r) {
        const __m256i a = _mm256_maddubs_epi16(first, four_columns(q[r] + 8 * j));
        const __m256i b = _mm256_maddubs_epi16(second, four_columns(q[r] + 8 * j + 4));
        pairs[r] = j == 0 ? _mm256_add_epi16(a, b) : _mm256_add_epi16(pairs[r], _mm256_add_epi16(a, b));
        now(pairs[r]);
      }
    }
    for (int r = 0; r < kRows; ++r) dot[r].v = _mm256_madd_epi16(pairs[r], ones);
  } else {
    // Signed weights: their sign goes to the activation, two products of at most 128 * 127 fit 16 bits.
    for (int j = 0; j < 8; ++j) {
      const __m256i line = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * j)), size = _mm256_abs_epi8(line);
      for (int r = 0; r < kRows; ++r) {
        const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(four_columns(q[r] + 4 * j), line));
        const __m256i sums = _mm256_madd_epi16(pairs, ones);
        dot[r].v = j == 0 ? sums : _mm256_add_epi32(dot[r].v, sums);
        now(dot[r].v);
      }
    }
  }
}

inline Eight add_block(Eight sum, Ints dot, Ints zeros, uint32_t q_sum, Eight scales, float x_scale) {
  const __m256i product = _mm256_sub_epi32(dot.v, _mm256_madd_epi16(zeros.v, _mm256_set1_epi32(int32_t(q_sum))));
  return {_mm256_fmadd_ps(_mm256_cvtepi32_ps(product), _mm256_mul_ps(scales.v, _mm256_set1_ps(x_scale)), sum.v)};
}

inline uint32_t store_bytes(int8_t* q, const float* x, float factor) {
  const __m256 f = _mm256_set1_ps(factor);
  const auto part = [&](int i) { return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), f)); };
  const __m256i halves = _mm256_packs_epi16(_mm256_packs_epi32(part(0), part(1)), _mm256_packs_epi32(part(2), part(3)));
  const __m256i bytes = _mm256_permutevar8x32_epi32(halves, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), bytes);
  const __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1));
  return uint16_t(_mm_cvtsi128_si32(s));
}

}  // namespace
