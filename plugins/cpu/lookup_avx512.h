// See lookup_scalar.h: four groups per load, entries added in bytes four at a time (4 * 63 < 256), then in 16 bits.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

inline void scan_block(const uint8_t* codes, const uint8_t* table, int groups, int bias, int16_t scores[32]) {
  const __m512i four_bits = _mm512_set1_epi8(15), even_bytes = _mm512_set1_epi16(255), none = _mm512_setzero_si512();
  __m512i even[2] = {none, none}, odd[2] = {none, none};  // of the low and of the high halves; one group per lane of 16 bytes
  auto widen = [&](int half, __m512i bytes) {
    even[half] = _mm512_add_epi16(even[half], _mm512_and_si512(bytes, even_bytes));
    odd[half] = _mm512_add_epi16(odd[half], _mm512_srli_epi16(bytes, 8));
  };
  auto look_up = [&](__m512i code, __m512i entries, __m512i* low, __m512i* high) {
    *low = _mm512_add_epi8(*low, _mm512_shuffle_epi8(entries, _mm512_and_si512(code, four_bits)));
    *high = _mm512_add_epi8(*high, _mm512_shuffle_epi8(entries, _mm512_and_si512(_mm512_srli_epi16(code, 4), four_bits)));
  };
  int g = 0;
  for (; g + 16 <= groups; g += 16) {
    __m512i low = none, high = none;
    for (int n = 0; n < 16; n += 4)
      look_up(_mm512_loadu_si512(codes + 16 * (g + n)), _mm512_loadu_si512(table + 16 * (g + n)), &low, &high);
    widen(0, low);
    widen(1, high);
  }
  if (g < groups) {
    __m512i low = none, high = none;
    for (; g < groups; g += 4) {
      const __mmask64 there = g + 4 <= groups ? ~__mmask64(0) : (__mmask64(1) << 16 * (groups - g)) - 1;
      look_up(_mm512_maskz_loadu_epi8(there, codes + 16 * g), _mm512_maskz_loadu_epi8(there, table + 16 * g), &low, &high);
    }
    widen(0, low);
    widen(1, high);
  }
  for (int half = 0; half < 2; ++half) {
    auto all = [bias](__m512i x) {
      const __m256i two = _mm256_add_epi16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
      return _mm_add_epi16(_mm_add_epi16(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1)), _mm_set1_epi16(int16_t(bias)));
    };
    const __m128i e = all(even[half]), o = all(odd[half]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(scores + 16 * half), _mm_unpacklo_epi16(e, o));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(scores + 16 * half + 8), _mm_unpackhi_epi16(e, o));
  }
}

inline int collect(const int16_t* scores, int count, int threshold, int equal, int first, int32_t* out) {
  const __m512i limit = _mm512_set1_epi16(int16_t(threshold)), sixteen = _mm512_set1_epi32(16);
  __m512i slot = _mm512_add_epi32(_mm512_set1_epi32(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  int found = 0;
  for (int i = 0; i < count; i += 32) {
    const __mmask32 there = count - i >= 32 ? ~__mmask32(0) : (__mmask32(1) << (count - i)) - 1;
    const __m512i x = _mm512_maskz_loadu_epi16(there, scores + i);
    uint32_t taken = _mm512_mask_cmpgt_epi16_mask(there, x, limit);
    if (equal > 0) {
      uint32_t same = _mm512_mask_cmpeq_epi16_mask(there, x, limit);
      for (; same != 0 && equal > 0; same &= same - 1, --equal) taken |= same & -same;
    }
    for (int half = 0; half < 2; ++half, taken >>= 16) {
      _mm512_storeu_si512(out + found, _mm512_maskz_compress_epi32(__mmask16(taken), slot));
      found += __builtin_popcount(taken & 0xffff);
      slot = _mm512_add_epi32(slot, sixteen);
    }
  }
  return found;
}

}  // namespace
