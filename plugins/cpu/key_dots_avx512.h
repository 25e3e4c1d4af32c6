// Products of stored keys with query heads in whole numbers (key_dots_any.h defines them), sixteen keys at a time. Levels of all sixteen are found
// side by side. Then each quarter of a register is a key of its own, of which 16 numbers at a time meet those of four query heads: what a code
// stands for is looked up, and numbers that are positive are turned round by a mask.
#pragma once
#include <cstring>

#include "cpu/ranking.h"
#include "cpu/signs_avx512.h"

namespace {

constexpr int kDotKeys = 16;
constexpr int kDotTokens = 32;  // whose blocks are turned round together

// 16 bytes from four places, a quarter of a register each.
inline __m512i four_parts(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
  auto part = [](const uint8_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); };
  __m512i x = _mm512_castsi128_si512(part(a));
  x = _mm512_mask_broadcast_i32x4(x, 0x00f0, part(b));
  x = _mm512_mask_broadcast_i32x4(x, 0x0f00, part(c));
  return _mm512_mask_broadcast_i32x4(x, 0xf000, part(d));
}

// 16 bytes of keys n, 4 + n, 8 + n and 12 + n.
inline __m512i parts_of_keys(const uint8_t* const records[kDotKeys], int n, int64_t offset) {
  return four_parts(records[n] + offset, records[4 + n] + offset, records[8 + n] + offset, records[12 + n] + offset);
}

// Zero points and scales of sixteen keys as fp16 pairs, one register for a group, from group `first` on. What is read behind the last pair of a
// record is the next record or the next plane.
inline void pairs_of_keys(const uint8_t* const records[kDotKeys], int64_t offset, int first, __m512i out[4]) {
  __m512i keys[4];  // keys n, 4 + n, 8 + n and 12 + n
  for (int n = 0; n < 4; ++n) keys[n] = parts_of_keys(records, n, offset + 4 * first);
  transpose_fours(keys, out);
}
inline __m512 zero_points(__m512i pairs) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs)); }
inline __m512 scales(__m512i pairs) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16))); }

// What bytes of keys are when their number is negative: 63 less the level. Words: those of even codes, and of the odd ones behind them.
inline __m512i negative_bytes(__m512i even, __m512i odd) {
  const __m512i level = _mm512_ternarylogic_epi32(_mm512_set1_epi16(255), _mm512_srli_epi16(even, kLevelShift), odd, 0xCA);
  const __m512i most = _mm512_set1_epi8(kMostLevel);
  return _mm512_sub_epi8(most, _mm512_min_epi8(_mm512_max_epi8(level, _mm512_setzero_si512()), most));
}

// Levels of sixteen keys by group: with 2 bits four bytes of each, one behind the other; with 4 zero points and scales as words, four and four in a
// quarter. Returns their largest magnitudes.
template <int kBits>
inline __m512 levels_of_keys(const uint8_t* const records[kDotKeys], int64_t offset, int groups, __m512i* level) {
  __m512 top = _mm512_setzero_ps();
  for (int g = 0; g < groups; g += 4) {
    pairs_of_keys(records, offset, g, level + g);
    for (int i = g; i < g + 4 && i < groups; ++i) {
      const __m512 most = _mm512_mul_ps(scales(level[i]), _mm512_set1_ps((1 << kBits) - 1));
      top = _mm512_max_ps(_mm512_add_ps(zero_points(level[i]), most), top);
    }
  }
  const __mmask16 some = _mm512_cmp_ps_mask(top, _mm512_setzero_ps(), _CMP_GT_OQ);
  const __m512 factor = _mm512_maskz_div_ps(some, _mm512_set1_ps(kLargestKey), top);
  for (int g = 0; g < groups; ++g) {
    auto whole = [&](__m512 x) { return _mm512_cvtps_epi32(_mm512_mul_ps(x, factor)); };
    const __m512i words = _mm512_packs_epi32(whole(zero_points(level[g])), whole(scales(level[g])));
    if constexpr (kBits == 2) {
      auto spread = [&](__m128i which) { return _mm512_shuffle_epi8(words, _mm512_broadcast_i32x4(which)); };
      const __m512i zero_point = spread(_mm_setr_epi8(0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7));
      const __m512i scale = spread(_mm_setr_epi8(8, 9, 8, 9, 10, 11, 10, 11, 12, 13, 12, 13, 14, 15, 14, 15));
      const __m512i second = spread(_mm_setr_epi8(-1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15));
      const __m512i even = _mm512_add_epi16(_mm512_add_epi16(zero_point, second), second);
      level[g] = negative_bytes(even, _mm512_add_epi16(even, scale));
    } else {
      level[g] = words;
    }
  }
  return top;
}

// What the codes of a group of keys n, 4 + n, 8 + n and 12 + n stand for when their numbers are negative, a quarter for each.
template <int kBits>
inline __m512i table_of_keys(__m512i level, int n) {
  if constexpr (kBits == 2) return _mm512_shuffle_epi8(level, _mm512_set1_epi32(0x03020100 + 0x04040404 * n));
  const __m512i zero_point = _mm512_shuffle_epi8(level, _mm512_set1_epi16(short(0x0100 + 0x0202 * n)));
  const __m512i scale = _mm512_shuffle_epi8(level, _mm512_set1_epi16(short(0x0908 + 0x0202 * n)));
  const __m512i even_codes = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 2, 4, 6, 8, 10, 12, 14));
  const __m512i even = _mm512_add_epi16(zero_point, _mm512_mullo_epi16(scale, even_codes));
  return negative_bytes(even, _mm512_add_epi16(even, scale));
}

// sum plus the products of four bytes of a, without a sign, and four of b, for each 32 bits. In assembler, so that the rest of the file asks for no
// more than AVX-512.
inline __m512i add_fours_of_bytes(__m512i sum, __m512i a, __m512i b) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "vm"(b));
  return sum;
}

// Products of keys n, 4 + n, 8 + n and 12 + n of sixteen with R query heads: in each quarter those of one key. queries: 16 numbers in all quarters,
// [R][2 groups]; signs: as
// masks_of_keys writes them.
template <int R, int kBits, bool kFours>
inline __m512i dots_of_four(const uint8_t* const records[kDotKeys], const __m512i* level, const uint64_t* signs, const __m512i* queries, int groups, int n) {
  const __m512i ones = _mm512_set1_epi16(1), turned = _mm512_set1_epi8(127), code_bits = _mm512_set1_epi8((1 << kBits) - 1);
  __m512i sum[4];
  for (__m512i& s : sum) s = _mm512_setzero_si512();
  __m512i codes = ones;
#pragma GCC unroll 4
  for (int g = 0; g < groups; ++g) {
    const __m512i table = table_of_keys<kBits>(level[g], n);
    __m512i code[2];
    if constexpr (kBits == 2) {  // the low or the high half of the codes of two groups
      if (g % 2 == 0) codes = parts_of_keys(records, n, 8 * g);
      const __m512i both = g % 2 == 0 ? _mm512_unpacklo_epi64(codes, codes) : _mm512_unpackhi_epi64(codes, codes);
      code[0] = _mm512_srlv_epi64(both, _mm512_broadcast_i32x4(_mm_set_epi64x(2, 0)));
      code[1] = _mm512_srlv_epi64(both, _mm512_broadcast_i32x4(_mm_set_epi64x(6, 4)));
    } else {
      code[0] = parts_of_keys(records, n, 16 * g);
      code[1] = _mm512_srli_epi16(code[0], 4);
    }
    __m512i key[2];
    for (int half = 0; half < 2; ++half) {
      const __m512i negative = _mm512_shuffle_epi8(table, _mm512_and_si512(code[half], code_bits));
      key[half] = _mm512_mask_sub_epi8(negative, signs[8 * g + half], turned, negative);
    }
    for (int h = 0; h < R; ++h) {
      const __m512i* q = queries + h * 2 * groups + 2 * g;
      if constexpr (kFours) {
        sum[h] = add_fours_of_bytes(add_fours_of_bytes(sum[h], key[0], q[0]), key[1], q[1]);
        continue;
      }
      const __m512i two = _mm512_add_epi16(_mm512_maddubs_epi16(key[0], q[0]), _mm512_maddubs_epi16(key[1], q[1]));
      sum[h] = _mm512_add_epi32(sum[h], _mm512_madd_epi16(two, ones));
    }
  }
  auto pairs = [](__m512i a, __m512i b) { return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)); };
  const __m512i a = pairs(sum[0], sum[1]), b = pairs(sum[2], sum[3]);
  return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

// Masks of sixteen keys' signs, [2 groups] of those of keys n, 4 + n, 8 + n and 12 + n, eight bytes for each n, by pairs.
inline void masks_of_keys(const uint8_t* rows, const int32_t* row, int units, uint64_t* masks) {
  for (int u = 0; u < units; ++u, rows += kTurnedBytes, masks += 32) {
    __m512i x[4];
    for (int i = 0; i < 4; ++i) x[i] = four_parts(rows + row[4 * i], rows + row[4 * i + 1], rows + row[4 * i + 2], rows + row[4 * i + 3]);
    const __m512i a = _mm512_unpacklo_epi16(x[0], x[1]), b = _mm512_unpacklo_epi16(x[2], x[3]);
    const __m512i c = _mm512_unpackhi_epi16(x[0], x[1]), d = _mm512_unpackhi_epi16(x[2], x[3]);
    _mm512_store_si512(masks, _mm512_unpacklo_epi32(a, b));
    _mm512_store_si512(masks + 8, _mm512_unpackhi_epi32(a, b));
    _mm512_store_si512(masks + 16, _mm512_unpacklo_epi32(c, d));
    _mm512_store_si512(masks + 24, _mm512_unpackhi_epi32(c, d));
  }
}

// Products of the candidates' keys with R query heads; of the first heads, their largest magnitudes.
template <int R, int kBits, int kGroups, bool kFours>
inline void dots_of_heads_by(const PickedSlots& t, const int8_t* queries, const WholeQuery* whole, int dim, float* largest, float* out, int64_t stride) {
  constexpr int kMost = kGroups ? (kGroups + 3) / 4 * 4 : 32, kUnits = kMost / 4;
  const PackedBody& b = t.body;
  const int groups = kGroups ? kGroups : b.key_groups(), units = kGroups ? kUnits : turned_units(b.key_dim / 4), width = units * kTurnedBytes;
  alignas(64) uint8_t rows[(kDotTokens + 1) * kUnits * kTurnedBytes];
  alignas(64) uint64_t masks[kUnits * 32];
  __m512i repeated[R * 2 * kMost], level[kMost];
  for (int h = 0; h < R; ++h)
    for (int i = 0; i < 2 * groups; ++i)
      repeated[h * 2 * groups + i] = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(queries + h * dim + 16 * i)));
  BlockList<kDotTokens> blocks, next;
  auto list = [&](int first, int32_t before, BlockList<kDotTokens>& to) {
    to.list(t.slots + first, t.listed - first < kDotTokens ? t.listed - first : kDotTokens, before, width);
  };
  list(0, -1, next);
  for (int first = 0; first < t.count; first += kDotTokens) {
    blocks = next;
    if (first + kDotTokens < t.listed) {
      list(first + kDotTokens, blocks.block[blocks.count], next);
      for (int i = 1; i <= next.count; ++i) b.fetch_codes(next.block[i] * EDGEKV_INDEX_TOKENS);
    }
    for (int i = 1; i <= blocks.count; ++i)
      for (int u = 0; u < units; ++u) turn_signs(b.codes(blocks.block[i] * EDGEKV_INDEX_TOKENS) + u * kTurnedBytes, rows + i * width + u * kTurnedBytes);
    for (int from = first; from < first + kDotTokens && from < t.count; from += kDotKeys) {
      const uint8_t* records[kDotKeys];
      for (int i = 0; i < kDotKeys; ++i) records[i] = t.record(from + i < t.count ? from + i : t.count - 1);
      masks_of_keys(rows, blocks.row + (from - first), units, masks);
      const uint64_t* loaded = masks;
      __asm__("" : "+r"(loaded) : : "memory");  // else GCC takes them out of the registers above one by one
      _mm512_storeu_ps(largest + from, levels_of_keys<kBits>(records, int64_t(b.record.key_pairs), groups, level));
      __m512i dots[4], of_head[4];
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) {
        for (int i = 0; i < 4; ++i) t.fetch_key(from + 4 * n + i);  // a few at a time, as a processor waits for few lines of memory at once
        dots[n] = dots_of_four<R, kBits, kFours>(records, level, loaded + 2 * n, repeated, groups, n);
      }
      transpose_fours(dots, of_head);
      for (int h = 0; h < R; ++h) {
        const __m512i products = _mm512_sub_epi32(_mm512_add_epi32(of_head[h], of_head[h]), _mm512_set1_epi32(127 * whole[h].sum));
        _mm512_storeu_ps(out + h * stride + from, _mm512_cvtepi32_ps(products));
      }
    }
    std::memcpy(rows, rows + blocks.count * width, size_t(width));
  }
}

template <int R, int kBits, int kGroups>
inline void dots_of_heads(const PickedSlots& t, const int8_t* queries, const WholeQuery* whole, int dim, float* largest, float* out, int64_t stride) {
  static const bool fours = __builtin_cpu_supports("avx512vnni");
  fours ? dots_of_heads_by<R, kBits, kGroups, true>(t, queries, whole, dim, largest, out, stride)
        : dots_of_heads_by<R, kBits, kGroups, false>(t, queries, whole, dim, largest, out, stride);
}

}  // namespace

#include "cpu/key_dots_cases.h"
