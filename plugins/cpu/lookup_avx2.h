// See lookup_scalar.h: two groups per load, entries added in bytes four at a time (4 * 63 < 256), then in 16 bits.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

inline void scan_block(const uint8_t* codes, const uint8_t* table, int groups, int bias, int16_t scores[32]) {
  const __m256i four_bits = _mm256_set1_epi8(15), even_bytes = _mm256_set1_epi16(255), none = _mm256_setzero_si256();
  __m256i even[2] = {none, none}, odd[2] = {none, none};  // of the low and of the high halves; one group per lane of 16 bytes
  auto widen = [&](int half, __m256i bytes) {
    even[half] = _mm256_add_epi16(even[half], _mm256_and_si256(bytes, even_bytes));
    odd[half] = _mm256_add_epi16(odd[half], _mm256_srli_epi16(bytes, 8));
  };
  auto look_up = [&](__m256i code, __m256i entries, __m256i* low, __m256i* high) {
    *low = _mm256_add_epi8(*low, _mm256_shuffle_epi8(entries, _mm256_and_si256(code, four_bits)));
    *high = _mm256_add_epi8(*high, _mm256_shuffle_epi8(entries, _mm256_and_si256(_mm256_srli_epi16(code, 4), four_bits)));
  };
  int g = 0;
  while (g < groups) {
    __m256i low = none, high = none;
    for (int n = 0; n < 4 && g < groups; ++n, g += 2) {
      const uint8_t *c = codes + 16 * g, *t = table + 16 * g;
      if (g + 2 <= groups) {
        look_up(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(c)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(t)), &low, &high);
      } else {
        look_up(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(c))),
                _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(t))), &low, &high);
      }
    }
    widen(0, low);
    widen(1, high);
  }
  const __m128i shift = _mm_set1_epi16(int16_t(bias));
  for (int half = 0; half < 2; ++half) {
    auto both = [](__m256i x) { return _mm_add_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)); };
    const __m128i e = _mm_add_epi16(both(even[half]), shift), o = _mm_add_epi16(both(odd[half]), shift);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(scores + 16 * half), _mm_unpacklo_epi16(e, o));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(scores + 16 * half + 8), _mm_unpackhi_epi16(e, o));
  }
}

}  // namespace
#include "cpu/collect.h"
