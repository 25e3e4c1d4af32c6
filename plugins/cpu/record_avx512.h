// See record_any.h. A code is shifted to the low bits of its lane and picks one of the 4 or 16 levels of its group: no code is masked
// or converted. The order of the numbers is that in which one load, repeated in all lanes, can be shifted.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr bool kSumsInRegisters = true;

template <int kBits>
constexpr int place(int n) {
  if (kBits == 2) return n / 8 % 2 * 16 + n % 4 * 4 + n / 16 * 2 + n / 4 % 2;
  if (kBits == 4) return n / 16 * 16 + n % 4 * 4 + n / 4 % 4;
  return n;
}

inline Vec pairs_of_record(const uint16_t* pairs, int groups) {
  const __m128i* from = reinterpret_cast<const __m128i*>(pairs);
  if (groups <= 2) return {_mm512_cvtph_ps(_mm256_zextsi128_si256(_mm_loadl_epi64(from)))};
  return groups <= 4 ? Vec{_mm512_cvtph_ps(_mm256_zextsi128_si256(_mm_loadu_si128(from)))} : load(pairs);
}

template <int kBits>
inline void value_group(const uint8_t* codes, const float* pair, Vec out[2]) {
  const __m512 zero_point = _mm512_set1_ps(pair[0]), scale = _mm512_set1_ps(pair[1]);
  if constexpr (kBits == 2) {
    const __m512i down = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
    const __m512 level = _mm512_fmadd_ps(scale, _mm512_broadcast_f32x4(_mm_setr_ps(0, 1, 2, 3)), zero_point);
    int64_t bytes;
    std::memcpy(&bytes, codes, 8);
    const __m512i x = _mm512_srlv_epi32(_mm512_set1_epi64(bytes), down);
    out[0].v = _mm512_permutevar_ps(level, x);
    out[1].v = _mm512_permutevar_ps(level, _mm512_srli_epi32(x, 2));
  } else if constexpr (kBits == 4) {
    const __m512i down = _mm512_setr_epi32(0, 0, 0, 0, 8, 8, 8, 8, 16, 16, 16, 16, 24, 24, 24, 24);
    const __m512 level = _mm512_fmadd_ps(scale, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), zero_point);
    const __m512i x = _mm512_srlv_epi32(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))), down);
    out[0].v = _mm512_permutexvar_ps(x, level);
    out[1].v = _mm512_permutexvar_ps(_mm512_srli_epi32(x, 4), level);
  } else {
    Vec code[2];
    unpack<8>(codes, code);
    for (int half = 0; half < 2; ++half) out[half].v = _mm512_fmadd_ps(code[half].v, scale, zero_point);
  }
}

}  // namespace
