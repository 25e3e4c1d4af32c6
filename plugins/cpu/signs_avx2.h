// The sign codes of single tokens, out of the index plane, which holds those of 32 tokens side by side: a block of it is turned round once
// for all the tokens that are wanted of it.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

// Groups of four numbers that are turned together: 512 bytes of a block. A key with fewer in its last ones is read as if what follows in
// the state were some.
constexpr int kTurnedGroups = 32;
inline int turned_width(int groups) { return (groups + kTurnedGroups - 1) / kTurnedGroups * kTurnedGroups; }

// Rows [16][turned_width]: byte g of row i has the code of group g of token i in its low and of token i + 16 in its high half.
inline void turn_block(const uint8_t* block, int width, uint8_t* rows) {
  for (int first = 0; first < width; first += kTurnedGroups, block += 16 * kTurnedGroups) {
    __m256i a[16], b[16];  // groups g and g + 16 in the two lanes
    for (int g = 0; g < 16; ++g) {
      const __m128i *low = reinterpret_cast<const __m128i*>(block + 16 * g), *high = low + 16;
      a[g] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)), _mm_loadu_si128(high), 1);
    }
    auto interleave = [](const __m256i* from, __m256i* to) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        to[2 * i] = _mm256_unpacklo_epi8(from[i], from[i + 8]);
        to[2 * i + 1] = _mm256_unpackhi_epi8(from[i], from[i + 8]);
      }
    };
    interleave(a, b);
    interleave(b, a);
    interleave(a, b);
    interleave(b, a);
    for (int i = 0; i < 16; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows + i * width + first), a[i]);
  }
}

// A token's codes out of such a row, in the high halves of bytes; of those of tokens 16 .. 31 they are there already.
inline void take_signs(const uint8_t* row, bool there, int width, uint8_t* out) {
  const __m128i shift = _mm_cvtsi32_si128(there ? 0 : 4);
  for (int i = 0; i < width; i += 32)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_sll_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + i)), shift));
}

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
