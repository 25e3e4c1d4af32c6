// See record_any.h. A code is shifted to the low bits of its lane and picks one of the 4 or 16 levels of its group: no code is masked
// or converted. The order of the numbers is that in which one load, repeated in all lanes, can be shifted.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int kTokensAtOnce = 4;
constexpr bool kSumsInRegisters = true;

template <int kBits>
constexpr int place(int n) {
  if (kBits == 2) return n / 8 % 2 * 16 + n % 4 * 4 + n / 16 * 2 + n / 4 % 2;
  if (kBits == 4) return n / 16 * 16 + n % 4 * 4 + n / 4 % 4;
  return n;
}

// Byte 2i of lane L of the sum is the code of group 4i + L; the last of P parts of four groups may be short.
template <int P>
inline void gather_parts(const uint8_t* codes, int groups, int token, uint8_t* row) {
  const __m512i byte = _mm512_set1_epi8(char(token % 16));
  const __m512i up = _mm512_setr_epi64(0, 0, 0x0004000400040004, 0x0004000400040004, 0x0008000800080008, 0x0008000800080008, 0x000c000c000c000c,
                                       0x000c000c000c000c);
  const __mmask64 last = groups % 4 == 0 ? ~__mmask64(0) : (__mmask64(1) << 16 * (groups % 4)) - 1;
  __m512i all = _mm512_setzero_si512();
  for (int i = 0; i < P; ++i) {
    const __m512i four = i < P - 1 ? _mm512_loadu_si512(codes + 64 * i) : _mm512_maskz_loadu_epi8(last, codes + 64 * i);
    all = _mm512_mask_shuffle_epi8(all, __mmask64(0x0001000100010001) << 2 * i, four, byte);
  }
  all = _mm512_sllv_epi16(_mm512_and_si512(_mm512_srl_epi16(all, _mm_cvtsi32_si128(token / 16 * 4)), _mm512_set1_epi16(15)), up);
  const __m256i two = _mm256_or_si256(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  const __m128i one = _mm_or_si128(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
  if (P > 6)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(row), one);
  else if (P == 4 || P == 3)
    _mm_storel_epi64(reinterpret_cast<__m128i*>(row), one);
  else
    _mm_mask_storeu_epi32(row, __mmask8((1 << (P + 1) / 2) - 1), one);
}

template <int P>
inline void gather_tile(const uint8_t* index, int groups, const int32_t* slots, int count, uint8_t* rows, int row_bytes) {
  for (int i = 0; i < count; ++i)
    gather_parts<P>(index + int64_t(slots[i] / 32) * 16 * groups, groups, slots[i] % 32, rows + int64_t(i) * row_bytes);
}

inline void gather_signs(const uint8_t* index, int groups, const int32_t* slots, int count, uint8_t* rows, int row_bytes) {
  // The usual head sizes have loops of their own, in which all constants stay in registers.
  if (groups == 32) return gather_tile<8>(index, 32, slots, count, rows, row_bytes);
  if (groups == 16) return gather_tile<4>(index, 16, slots, count, rows, row_bytes);
  for (int i = 0; i < count; ++i) {
    const uint8_t* codes = index + int64_t(slots[i] / 32) * 16 * groups;
    for (int first = 0; first < groups; first += 4) {
      const int here = groups - first < 4 ? groups - first : 4;
      uint8_t two[4];
      gather_parts<1>(codes + 16 * first, here, slots[i] % 32, two);
      std::memcpy(rows + int64_t(i) * row_bytes + first / 2, two, 2);
    }
    if ((groups + 3) / 4 % 2) std::memset(rows + int64_t(i) * row_bytes + (groups + 3) / 4 * 2, 0, 2);
  }
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

// Magnitudes as value_group hands them over, with their signs.
template <int kBits>
inline void key_group(const uint8_t* codes, const float* pair, uint32_t positive, Vec out[2]) {
  static_assert(kBits == 2 || kBits == 4);
  // Bit n where out[0] has number n; that of out[1] is 8 or 16 above it.
  const __m512i low = kBits == 2 ? _mm512_setr_epi32(1, 1 << 4, 1 << 16, 1 << 20, 1 << 1, 1 << 5, 1 << 17, 1 << 21, 1 << 2, 1 << 6, 1 << 18, 1 << 22,
                                                     1 << 3, 1 << 7, 1 << 19, 1 << 23)
                                 : _mm512_setr_epi32(1, 1 << 4, 1 << 8, 1 << 12, 1 << 1, 1 << 5, 1 << 9, 1 << 13, 1 << 2, 1 << 6, 1 << 10, 1 << 14,
                                                     1 << 3, 1 << 7, 1 << 11, 1 << 15);
  const __m512i signs = _mm512_set1_epi32(int32_t(positive)), high = _mm512_slli_epi32(low, kBits == 2 ? 8 : 16);
  const __m512 sign = _mm512_set1_ps(-0.0f);
  value_group<kBits>(codes, pair, out);
  out[0].v = _mm512_mask_xor_ps(out[0].v, _mm512_testn_epi32_mask(signs, low), out[0].v, sign);
  out[1].v = _mm512_mask_xor_ps(out[1].v, _mm512_testn_epi32_mask(signs, high), out[1].v, sign);
}

}  // namespace
