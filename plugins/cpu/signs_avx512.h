// The sign codes of single tokens as masks, out of the index plane, which holds those of 32 tokens side by side. What signs_avx2.h does, with one
// bit for a number: a block is turned round once for all the tokens that are wanted of it.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

// Groups of four numbers that are turned together: 512 bytes of a block, 128 bits of a token. A key with fewer in its last ones is read as if what
// follows in the state were some.
constexpr int kTurnedGroups = 32;
constexpr int kTurnedBytes = 512;
inline int turned_units(int groups) { return (groups + kTurnedGroups - 1) / kTurnedGroups; }

// Columns of four rows of four: number n of out[i] is number i of in[n], in each quarter of a register.
inline void transpose_fours(const __m512i in[4], __m512i out[4]) {
  const __m512i a = _mm512_unpacklo_epi32(in[0], in[1]), b = _mm512_unpacklo_epi32(in[2], in[3]);
  const __m512i c = _mm512_unpackhi_epi32(in[0], in[1]), d = _mm512_unpackhi_epi32(in[2], in[3]);
  out[0] = _mm512_unpacklo_epi64(a, b), out[1] = _mm512_unpackhi_epi64(a, b);
  out[2] = _mm512_unpacklo_epi64(c, d), out[3] = _mm512_unpackhi_epi64(c, d);
}

// Turns 32 groups of 32 tokens: bit n of a token's 16 bytes is set where number n is positive. Those of token i are at
// (i & 16) * 16 + (i & 3) * 64 + (i & 12) * 4.
inline void turn_signs(const uint8_t* block, uint8_t* rows) {
  // Four of the even groups of eight, and of the odd ones: their parts of four tokens each side by side.
  const __m512i even = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27), odd = _mm512_add_epi32(even, _mm512_set1_epi32(4));
  const __m512i by_token = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512i four_bits = _mm512_set1_epi8(15);
  __m512i low[4], high[4];  // of tokens 0 .. 15 and 16 .. 31
  for (int k = 0; k < 4; ++k) {
    const __m512i a = _mm512_loadu_si512(block + 128 * k), b = _mm512_loadu_si512(block + 128 * k + 64);
    const __m512i e = _mm512_permutex2var_epi32(a, even, b), o = _mm512_permutex2var_epi32(a, odd, b);
    // The third argument where a bit of the first is not set, else the second.
    low[k] = _mm512_shuffle_epi8(_mm512_ternarylogic_epi32(four_bits, e, _mm512_slli_epi16(o, 4), 0xCA), by_token);
    high[k] = _mm512_shuffle_epi8(_mm512_ternarylogic_epi32(four_bits, _mm512_srli_epi16(e, 4), o, 0xCA), by_token);
  }
  __m512i out[4];
  transpose_fours(low, out);
  for (int j = 0; j < 4; ++j) _mm512_storeu_si512(rows + 64 * j, out[j]);
  transpose_fours(high, out);
  for (int j = 0; j < 4; ++j) _mm512_storeu_si512(rows + 256 + 64 * j, out[j]);
}

// The blocks that up to kSlots slots lie in, from number 1 on, and where the bits of each slot are in rows of `width` bytes a block. Block 0 is the
// last one of the slots before.
template <int kSlots>
struct BlockList {
  int32_t block[1 + kSlots + 16];
  alignas(64) int32_t row[kSlots];
  int count;  // without block 0

  void list(const int32_t* slots, int size, int32_t before, int width) {
    count = 0;
    block[0] = before;
    for (int i = 0; i < size; i += 16) {
      const __m512i listed = _mm512_mask_loadu_epi32(_mm512_set1_epi32(slots[size - 1]), first_lanes(size - i), slots + i);
      const __m512i slot = _mm512_max_epi32(listed, _mm512_setzero_si512()), of = _mm512_srli_epi32(slot, 5);  // a damaged list may have others
      const __mmask16 fresh = _mm512_cmpneq_epi32_mask(of, _mm512_alignr_epi32(of, _mm512_set1_epi32(block[count]), 15));
      const __m512i none = _mm512_setzero_si512();
      __m512i number = _mm512_maskz_set1_epi32(fresh, 1);  // added up from the first lane on
      number = _mm512_add_epi32(number, _mm512_alignr_epi32(number, none, 15));
      number = _mm512_add_epi32(number, _mm512_alignr_epi32(number, none, 14));
      number = _mm512_add_epi32(number, _mm512_alignr_epi32(number, none, 12));
      number = _mm512_add_epi32(number, _mm512_alignr_epi32(number, none, 8));
      number = _mm512_add_epi32(number, _mm512_set1_epi32(count));
      auto bits = [&](int which, int shift) { return _mm512_slli_epi32(_mm512_and_si512(slot, _mm512_set1_epi32(which)), shift); };
      const __m512i inside = _mm512_or_si512(_mm512_or_si512(bits(16, 4), bits(3, 6)), bits(12, 2));
      _mm512_store_si512(row + i, _mm512_add_epi32(_mm512_mullo_epi32(number, _mm512_set1_epi32(width)), inside));
      _mm512_storeu_si512(block + 1 + count, _mm512_maskz_compress_epi32(fresh, of));
      count += __builtin_popcount(fresh);
    }
  }
};

}  // namespace
