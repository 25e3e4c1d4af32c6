// See key_dots_any.h: 32 numbers of a key at a time, as bytes. A number n, odd and from -127 to 127, is met as (n + 127) / 2, which is its
// level + 64 or, when it is negative, those seven bits turned round; what that adds to a product is taken off at the end. The products of
// two groups fit 16 bits: 4 * 127 * 64 < 32768. For AVX2 and all that includes it.
#pragma once
#include <cstring>

#include "cpu/ranking.h"
#include "cpu/signs_avx2.h"

namespace {

constexpr int kDotTokens = 16;  // a multiple of 8: their tables are made before their products, as a token's are a long chain and those of many overlap

// Zero points and scales of four groups. What is read behind the last pair of a record is the next record or the next plane.
inline __m256 four_pairs(const uint8_t* pairs, int g) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs + 4 * g))); }

// The largest magnitudes that the groups of four tokens could hold.
template <int kBits>
inline __m128 largest_of(const uint8_t* const pairs[4], int groups) {
  __m256 top[4];
  for (__m256& t : top) t = _mm256_setzero_ps();
  for (int g = 0; g < groups; g += 4)
    for (int j = 0; j < 4; ++j) {
      const __m256 pair = four_pairs(pairs[j], g), most = _mm256_mul_ps(_mm256_movehdup_ps(pair), _mm256_set1_ps((1 << kBits) - 1));
      __m256 x = _mm256_add_ps(pair, most);  // what it is of scales does not count
      if (g + 4 > groups) {                  // the others are no groups of this key
        const __m256i there = _mm256_cmpgt_epi32(_mm256_set1_epi32(groups - g), _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
        x = _mm256_and_ps(x, _mm256_castsi256_ps(there));
      }
      top[j] = _mm256_max_ps(x, top[j]);
    }
  const __m256 two = _mm256_shuffle_ps(top[0], top[1], 0x88), others = _mm256_shuffle_ps(top[2], top[3], 0x88);
  const __m256 each = _mm256_max_ps(_mm256_shuffle_ps(two, others, 0x88), _mm256_shuffle_ps(two, others, 0xDD));
  return _mm_max_ps(_mm256_castps256_ps128(each), _mm256_extractf128_ps(each, 1));
}

// Levels of codes, the bits below them not yet shifted out, as bytes with 64 added.
inline __m256i level_bytes(__m256i a, __m256i b) {
  const __m256i bytes = _mm256_packus_epi16(_mm256_srai_epi16(a, kLevelShift), _mm256_srai_epi16(b, kLevelShift));
  return _mm256_add_epi8(_mm256_min_epu8(bytes, _mm256_set1_epi8(kMostLevel)), _mm256_set1_epi8(kMostLevel + 1));
}

// Bytes of what a group's codes stand for: with 2 bits that of a negative and then that of a positive number, with 4 of a positive one.
constexpr int table_bytes(int bits) { return bits == 2 ? 8 : 16; }
// Where that of group g lies in a token's tables.
template <int kBits>
constexpr int table_at(int g) {
  return kBits == 2 ? 8 * g : g / 4 * 64 + g % 2 * 32 + g % 4 / 2 * 16;
}

// Writes the tables of four groups of two tokens, from their zero points and scales as words, a lane for two groups.
template <int kBits>
inline void write_tables(__m256i a, __m256i b, uint8_t* to_a, uint8_t* to_b) {
  auto store = [](uint8_t* to, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); };
  if constexpr (kBits == 2) {
    const __m256i zero_points = _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 4, 5, 4, 5, 4, 5, 4, 5, 0, 1, 0, 1, 0, 1, 0, 1, 4, 5, 4, 5, 4, 5, 4, 5);
    const __m256i scales = _mm256_add_epi8(zero_points, _mm256_set1_epi8(2)), code = _mm256_set1_epi64x(0x0003000200010000);
    auto words = [&](__m256i x) __attribute__((always_inline)) {
      return _mm256_add_epi16(_mm256_shuffle_epi8(x, zero_points), _mm256_mullo_epi16(_mm256_shuffle_epi8(x, scales), code));
    };
    const __m256i positive = level_bytes(words(a), words(b)), negative = _mm256_xor_si256(positive, _mm256_set1_epi8(127));
    store(to_a, _mm256_unpacklo_epi32(negative, positive));
    store(to_b, _mm256_unpackhi_epi32(negative, positive));
  } else {
    const __m256i eight = _mm256_broadcastsi128_si256(_mm_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7));
    for (int n = 0; n < 2; ++n) {  // the first and the second group of each lane
      const __m256i zero_point = _mm256_set1_epi16(n == 0 ? 0x0100 : 0x0504), scale = _mm256_set1_epi16(n == 0 ? 0x0302 : 0x0706);
      auto both = [&](__m256i x, uint8_t* to) __attribute__((always_inline)) {
        const __m256i s = _mm256_shuffle_epi8(x, scale), low = _mm256_add_epi16(_mm256_shuffle_epi8(x, zero_point), _mm256_mullo_epi16(s, eight));
        store(to, level_bytes(low, _mm256_add_epi16(low, _mm256_slli_epi16(s, 3))));
      };
      both(a, to_a + 32 * n);
      both(b, to_b + 32 * n);
    }
  }
}

// The tables and largest magnitudes of up to kDotTokens keys.
template <int kBits>
inline void make_tables(const uint8_t* const* pairs, int count, int groups, uint8_t* tables, float* largest) {
  const int fours = (groups + 3) / 4;
  alignas(32) float factor[kDotTokens];
  for (int i = 0; i < count; i += 4) _mm_storeu_ps(factor + i, largest_of<kBits>(pairs + i, groups));
  std::memcpy(largest, factor, size_t(count) * sizeof(float));
  for (int i = 0; i < count; i += 8) {
    const __m256 top = _mm256_load_ps(factor + i), some = _mm256_cmp_ps(top, _mm256_setzero_ps(), _CMP_GT_OQ);
    _mm256_store_ps(factor + i, _mm256_and_ps(_mm256_div_ps(_mm256_set1_ps(kLargestKey), top), some));
  }
  const int width = fours * 4 * table_bytes(kBits);
  for (int i = 0; i < count; i += 2, tables += 2 * width)
    for (int n = 0; n < fours; ++n) {
      auto words = [&](int j) __attribute__((always_inline)) {
        const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(four_pairs(pairs[j], 4 * n), _mm256_broadcast_ss(factor + j)));
        return _mm256_packs_epi32(whole, whole);
      };
      uint8_t* to = tables + n * 4 * table_bytes(kBits);
      write_tables<kBits>(words(i), words(i + 1), to, to + width);
    }
}

// A group of a key as bytes. signs: its codes in the high halves of 8 bytes.
template <int kBits>
inline __m256i key_bytes(const uint8_t* codes, const uint8_t* table, const uint8_t* signs) {
  auto eight = [](const uint8_t* at) {
    long long x;
    std::memcpy(&x, at, 8);
    return _mm256_set1_epi64x(x);
  };
  auto sixteen = [](const uint8_t* at) { return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); };
  const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7);
  const __m256i positive = _mm256_and_si256(_mm256_shuffle_epi8(eight(signs), spread), _mm256_set1_epi32(int(0x80402010)));
  if constexpr (kBits == 2) {
    const __m256i code = _mm256_and_si256(_mm256_srlv_epi64(eight(codes), _mm256_setr_epi64x(0, 2, 4, 6)), _mm256_set1_epi8(3));
    return _mm256_shuffle_epi8(eight(table), _mm256_or_si256(code, _mm256_min_epu8(positive, _mm256_set1_epi8(4))));
  } else {
    const __m256i code = _mm256_and_si256(_mm256_srlv_epi64(sixteen(codes), _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15));
    const __m256i negative = _mm256_cmpeq_epi8(positive, _mm256_setzero_si256());
    return _mm256_xor_si256(_mm256_shuffle_epi8(sixteen(table), code), _mm256_and_si256(negative, _mm256_set1_epi8(127)));
  }
}

// Products of one key with R query heads, twice: in either lane a part of each.
template <int R, int kBits, int kGroups>
inline __m256i dots_of_key(const uint8_t* codes, const uint8_t* tables, const uint8_t* signs, const int8_t* queries, int dim) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sum[4];
  for (__m256i& s : sum) s = _mm256_setzero_si256();
  auto group = [&](int g) { return key_bytes<kBits>(codes + 4 * kBits * g, tables + table_at<kBits>(g), signs + 8 * g); };
  auto part = [&](int h, int d) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(queries + h * dim + d)); };
  const int groups = kGroups ? kGroups : dim / 32;
  int g = 0;
#pragma GCC unroll 2
  for (; g + 2 <= groups; g += 2) {
    const __m256i a = group(g), b = group(g + 1);
    for (int h = 0; h < R; ++h) {
      const __m256i two = _mm256_add_epi16(_mm256_maddubs_epi16(a, part(h, 32 * g)), _mm256_maddubs_epi16(b, part(h, 32 * g + 32)));
      const __m256i x = _mm256_madd_epi16(two, ones);
      sum[h] = g == 0 ? x : _mm256_add_epi32(sum[h], x);
    }
  }
  if (g < groups) {
    const __m256i a = group(g);
    for (int h = 0; h < R; ++h) sum[h] = _mm256_add_epi32(sum[h], _mm256_madd_epi16(_mm256_maddubs_epi16(a, part(h, 32 * g)), ones));
  }
  auto pairs = [](__m256i a, __m256i b) { return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)); };
  const __m256i a = pairs(sum[0], sum[1]), b = pairs(sum[2], sum[3]);
  return _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

// Products of the candidates' keys with R query heads; of the first heads, their largest magnitudes.
template <int R, int kBits, int kGroups>
inline void dots_of_heads(const PickedSlots& t, const int8_t* queries, const WholeQuery* whole, int dim, float* largest, float* out, int64_t stride) {
  constexpr int kFours = kGroups ? (kGroups + 3) / 4 : 8, kWidth = kFours * 4 * table_bytes(kBits);
  const PackedBody& b = t.body;
  const int groups = kGroups ? kGroups : b.key_groups();
  const int sign_width = kGroups && kGroups <= 4 ? kTurnedGroups : turned_width(b.key_dim / 4), width = (groups + 3) / 4 * 4 * table_bytes(kBits);
  alignas(32) uint8_t tables[kDotTokens * kWidth], signs[kDotTokens * 32 * kFours], rows[16 * 32 * kFours];
  alignas(16) int32_t offset[4] = {};
  for (int h = 0; h < R; ++h) offset[h] = 127 * whole[h].sum;
  const __m256i offsets = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(offset)));
  int block = -1;  // which one the rows are of
  for (int first = 0; first < t.count; first += kDotTokens) {
    const int count = t.count - first < kDotTokens ? t.count - first : kDotTokens;
    const uint8_t *record[kDotTokens], *pairs[kDotTokens];
    for (int i = 0; i < kDotTokens; ++i) {
      const int at = i < count ? first + i : first + count - 1, slot = t.slots[at];
      if (slot / EDGEKV_INDEX_TOKENS != block) {
        block = slot / EDGEKV_INDEX_TOKENS;
        turn_block(b.codes(slot), sign_width, rows);
      }
      take_signs(rows + slot % 16 * sign_width, slot & 16, sign_width, signs + i * sign_width);
      record[i] = t.record(at);
      pairs[i] = record[i] + b.record.key_pairs;
    }
    make_tables<kBits>(pairs, count, groups, tables, largest + first);
    for (int i = 0; i < count; i += 4) {
      __m256i two[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        t.fetch_key_and_codes(first + i + j);
        two[j] = dots_of_key<R, kBits, kGroups>(record[i + j], tables + (i + j) * width, signs + (i + j) * sign_width, queries, dim);
      }
      auto join = [&](__m256i a, __m256i b) {
        const __m256i all = _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
        return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_add_epi32(all, all), offsets));
      };
      const __m256 x = join(two[0], two[2]), y = join(two[1], two[3]);  // heads 0..3 of tokens 0 | 2 and 1 | 3
      const __m256 low = _mm256_unpacklo_ps(x, y), high = _mm256_unpackhi_ps(x, y);
      auto store = [&](int h, __m256 pairs, bool second) __attribute__((always_inline)) {
        const __m128 a = _mm256_castps256_ps128(pairs), b = _mm256_extractf128_ps(pairs, 1);
        if (h < R) _mm_storeu_ps(out + h * stride + first + i, second ? _mm_movehl_ps(b, a) : _mm_movelh_ps(a, b));
      };
      store(0, low, false), store(1, low, true), store(2, high, false), store(3, high, true);
    }
  }
}

}  // namespace

#include "cpu/key_dots_cases.h"
