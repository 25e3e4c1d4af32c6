// See key_dots_any.h: 32 numbers of a key at a time, as bytes. A number n, odd and from -127 to 127, is met as (n + 127) / 2, which is its
// level + 64 or, when it is negative, those seven bits turned round; what that adds to a product is taken off at the end. The products of
// two groups fit 16 bits: 4 * 127 * 64 < 32768. For AVX2 and all that includes it.
#pragma once
#include <cstring>

#include "cpu/ranking.h"
#include "cpu/signs_avx2.h"

namespace {

constexpr int kDotsAhead = 48;  // tokens: their records wait in the first cache
constexpr int kDotTokens = 32;  // whose tables are made before their products: a token's are a long chain, those of many overlap

// Levels of codes, 64 added, as bytes: 16 of them in either lane, the low lane's eight first.
inline __m256i levels_of(__m256i zero_point, __m256i scale, __m256i code) {
  const __m256i x = _mm256_srai_epi16(_mm256_add_epi16(zero_point, _mm256_mullo_epi16(scale, code)), kLevelShift);
  const __m256i level = _mm256_min_epi16(_mm256_max_epi16(x, _mm256_setzero_si256()), _mm256_set1_epi16(kMostLevel));
  const __m256i bytes = _mm256_add_epi16(level, _mm256_set1_epi16(kMostLevel + 1));
  return _mm256_permute4x64_epi64(_mm256_packus_epi16(bytes, bytes), 0x88);
}

// Four bytes for each group of a key, up to whole fours of groups: the levels of its codes, or with 4 bits zero point and scale. Returns
// the key's largest magnitude.
template <int kBits>
inline float make_tables(const uint8_t* pairs, int groups, uint32_t* tables) {
  // Zero points and scales of four groups. What is read behind the last pair of a record is the next record or the next plane.
  auto four = [pairs](int g) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs + 4 * g))); };
  __m256 top = _mm256_setzero_ps();
  for (int g = 0; g < groups; g += 4) {
    const __m256 pair = four(g), most = _mm256_mul_ps(_mm256_movehdup_ps(pair), _mm256_set1_ps((1 << kBits) - 1));
    __m256 x = _mm256_moveldup_ps(_mm256_add_ps(pair, most));
    if (g + 4 > groups) {  // the others are no groups of this key
      const __m256i there = _mm256_cmpgt_epi32(_mm256_set1_epi32(groups - g), _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
      x = _mm256_and_ps(x, _mm256_castsi256_ps(there));
    }
    top = _mm256_max_ps(x, top);
  }
  top = _mm256_max_ps(top, _mm256_permute_ps(top, 0x4E));
  top = _mm256_max_ps(top, _mm256_permute2f128_ps(top, top, 1));
  const __m256 some = _mm256_cmp_ps(top, _mm256_setzero_ps(), _CMP_GT_OQ);
  const __m256 factor = _mm256_and_ps(_mm256_div_ps(_mm256_set1_ps(kLargestKey), top), some);
  for (int g = 0; g < groups; g += 4) {
    const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(four(g), factor));
    const __m256i words = _mm256_packs_epi32(whole, whole);  // of two groups in each lane
    __m256i out = _mm256_permute4x64_epi64(words, 0x88);
    if constexpr (kBits == 2) {
      const __m256i zero_points = _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 4, 5, 4, 5, 4, 5, 4, 5, 0, 1, 0, 1, 0, 1, 0, 1, 4, 5, 4, 5, 4, 5, 4, 5);
      const __m256i scales = _mm256_add_epi8(zero_points, _mm256_set1_epi8(2));
      out = levels_of(_mm256_shuffle_epi8(words, zero_points), _mm256_shuffle_epi8(words, scales), _mm256_set1_epi64x(0x0003000200010000));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(tables + g), _mm256_castsi256_si128(out));
  }
  return _mm_cvtss_f32(_mm256_castps256_ps128(top));
}

// A group of a key as bytes.
template <int kBits>
inline __m256i key_bytes(const uint8_t* codes, uint32_t table, uint32_t signs) {
  __m256i level;
  if constexpr (kBits == 2) {
    int64_t eight;
    std::memcpy(&eight, codes, 8);
    const __m256i code = _mm256_srlv_epi64(_mm256_set1_epi64x(eight), _mm256_setr_epi64x(0, 2, 4, 6));
    level = _mm256_shuffle_epi8(_mm256_set1_epi32(int32_t(table)), _mm256_and_si256(code, _mm256_set1_epi8(3)));
  } else {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i code = _mm256_and_si256(_mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15));
    const __m256i counted = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    level = _mm256_shuffle_epi8(levels_of(_mm256_set1_epi16(int16_t(table)), _mm256_set1_epi16(int16_t(table >> 16)), counted), code);
  }
  const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201u));
  const __m256i set = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(int32_t(signs)), spread), bit);
  return _mm256_xor_si256(level, _mm256_andnot_si256(_mm256_cmpeq_epi8(set, bit), _mm256_set1_epi8(127)));
}

// Products of one key with R query heads, each less `offset`.
template <int R, int kBits>
inline __m128 dots_of_key(const uint8_t* codes, const uint32_t* tables, const uint32_t* signs, const int8_t* queries, int dim, __m128i offset) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sum[4];
  for (__m256i& s : sum) s = _mm256_setzero_si256();
  auto part = [&](int h, int d) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(queries + h * dim + d)); };
  const int groups = dim / 32;
  int g = 0;
  for (; g + 2 <= groups; g += 2) {
    const __m256i a = key_bytes<kBits>(codes + 4 * kBits * g, tables[g], signs[g]);
    const __m256i b = key_bytes<kBits>(codes + 4 * kBits * (g + 1), tables[g + 1], signs[g + 1]);
    for (int h = 0; h < R; ++h) {
      const __m256i two = _mm256_add_epi16(_mm256_maddubs_epi16(a, part(h, 32 * g)), _mm256_maddubs_epi16(b, part(h, 32 * g + 32)));
      sum[h] = _mm256_add_epi32(sum[h], _mm256_madd_epi16(two, ones));
    }
  }
  if (g < groups) {
    const __m256i a = key_bytes<kBits>(codes + 4 * kBits * g, tables[g], signs[g]);
    for (int h = 0; h < R; ++h) sum[h] = _mm256_add_epi32(sum[h], _mm256_madd_epi16(_mm256_maddubs_epi16(a, part(h, 32 * g)), ones));
  }
  auto pairs = [](__m256i a, __m256i b) { return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)); };
  const __m256i a = pairs(sum[0], sum[1]), b = pairs(sum[2], sum[3]);
  const __m256i c = _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
  const __m128i all = _mm_add_epi32(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
  return _mm_cvtepi32_ps(_mm_sub_epi32(_mm_add_epi32(all, all), offset));
}

// Products of the candidates' keys with R query heads; of the first heads, their largest magnitudes.
template <int R, int kBits>
inline void dots_of_heads(const PickedSlots& t, const int8_t* queries, const WholeQuery* whole, int dim, float* largest, float* out, int64_t stride) {
  alignas(32) uint32_t tables[kDotTokens * 32], signs[kDotTokens * 32];
  const PackedBody& b = t.body;
  const int groups = b.key_groups(), width = (groups + 3) / 4 * 4;
  alignas(16) int32_t offset[4] = {};
  for (int h = 0; h < R; ++h) offset[h] = 127 * whole[h].sum;
  const __m128i offsets = _mm_load_si128(reinterpret_cast<const __m128i*>(offset));
  for (int first = 0; first < t.count; first += kDotTokens) {
    const int count = t.count - first < kDotTokens ? t.count - first : kDotTokens;
    gather_signs(b.index, b.key_dim / 4, groups, t.slots + first, count, signs);
    for (int i = 0; i < count; ++i) {
      t.fetch_next(first + i, kDotsAhead);
      largest[first + i] = make_tables<kBits>(t.record(first + i) + b.record.key_pairs, groups, tables + i * width);
    }
    for (int i = 0; i < count; i += 4) {
      __m128 four[4];
      for (int j = 0; j < 4; ++j) {
        const int at = i + j < count ? i + j : count - 1;
        four[j] = dots_of_key<R, kBits>(t.record(first + at), tables + at * width, signs + at * groups, queries, dim, offsets);
      }
      _MM_TRANSPOSE4_PS(four[0], four[1], four[2], four[3]);
      for (int h = 0; h < R; ++h) _mm_storeu_ps(out + h * stride + first + i, four[h]);
    }
  }
}

template <int kBits>
inline void dots_of_bits(const PickedSlots& t, const int8_t* queries, const WholeQuery* whole, int group, int dim, float* largest, float* out, int64_t stride) {
  for (int g = 0; g < group; g += 4) {
    const int8_t* q = queries + int64_t(g) * dim;
    float* to = out + g * stride;
    switch (group - g) {
      case 1: dots_of_heads<1, kBits>(t, q, whole + g, dim, largest, to, stride); break;
      case 2: dots_of_heads<2, kBits>(t, q, whole + g, dim, largest, to, stride); break;
      case 3: dots_of_heads<3, kBits>(t, q, whole + g, dim, largest, to, stride); break;
      default: dots_of_heads<4, kBits>(t, q, whole + g, dim, largest, to, stride);
    }
  }
}

inline void key_dots(const PickedSlots& t, const int8_t* queries, const WholeQuery* whole, int group, int dim, float* largest, float* out, int64_t stride) {
  t.body.key_bits == 2 ? dots_of_bits<2>(t, queries, whole, group, dim, largest, out, stride)
                       : dots_of_bits<4>(t, queries, whole, group, dim, largest, out, stride);
}

}  // namespace
