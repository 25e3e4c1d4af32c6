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

}  // namespace
