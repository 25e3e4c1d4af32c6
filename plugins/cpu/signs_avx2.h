// The sign codes of single tokens, out of the index plane, which holds those of 32 tokens side by side. A load that starts at a token's
// byte has it in front of each lane of 16 bytes; interleaving moves what is in front of many loads together.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

// Bytes of the index plane that belong to a token, for U times 8 groups, `at` being that of the first: in the low lane those of even
// groups, in the high lane those of odd ones, 4 U of them. A byte holds the codes of two tokens. Groups that the key does not have
// are read from what follows in the state.
template <int U>
inline __m256i index_bytes(const uint8_t* at) {
  static_assert(U == 1 || U == 2 || U == 4);
  auto groups = [at](int g) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 16 * g)); };
  auto eight = [&](int g) {
    return _mm256_unpacklo_epi16(_mm256_unpacklo_epi8(groups(g), groups(g + 2)), _mm256_unpacklo_epi8(groups(g + 4), groups(g + 6)));
  };
  if constexpr (U == 1) return eight(0);
  if constexpr (U == 2) return _mm256_unpacklo_epi32(eight(0), eight(8));
  return _mm256_unpacklo_epi64(_mm256_unpacklo_epi32(eight(0), eight(8)), _mm256_unpacklo_epi32(eight(16), eight(24)));
}

// The signs of a token of those bytes: bit d is 1 where number d is positive, 32 U bits.
inline __m128i sign_bits(__m256i bytes, int token) {
  const __m256i codes = _mm256_and_si256(_mm256_srl_epi16(bytes, _mm_cvtsi32_si128(token / 16 * 4)), _mm256_set1_epi8(15));
  return _mm_or_si128(_mm256_castsi256_si128(codes), _mm_slli_epi16(_mm256_extracti128_si256(codes, 1), 4));
}

// The signs of `count` tokens, [count][units] words of 32 bits.
inline void gather_signs(const uint8_t* index, int groups, int units, const int32_t* slots, int count, uint32_t* signs) {
  for (int i = 0; i < count; ++i, signs += units) {
    const int token = slots[i] % 32;
    const uint8_t* at = index + int64_t(slots[i] / 32) * 16 * groups + token % 16;
    int u = 0;
    for (; u + 4 <= units; u += 4) _mm_storeu_si128(reinterpret_cast<__m128i*>(signs + u), sign_bits(index_bytes<4>(at + 128 * u), token));
    for (; u + 2 <= units; u += 2) _mm_storel_epi64(reinterpret_cast<__m128i*>(signs + u), sign_bits(index_bytes<2>(at + 128 * u), token));
    if (u < units) signs[u] = uint32_t(_mm_cvtsi128_si32(sign_bits(index_bytes<1>(at + 128 * u), token)));
  }
}

}  // namespace
