// See lookup_scalar.h: two groups per load, entries added in bytes four at a time (4 * 63 < 256), then in 16 bits.
#pragma once
#include <immintrin.h>

#include <array>
#include <cstdint>

namespace {

// Sums of 16 bits of the bytes of up to 257 vectors: even bytes and the odd ones above them together, and odd ones alone.
struct ByteSums {
  __m256i both = _mm256_setzero_si256(), odd = _mm256_setzero_si256();

  void add(__m256i bytes) {
    both = _mm256_add_epi16(both, bytes);
    odd = _mm256_add_epi16(odd, _mm256_srli_epi16(bytes, 8));
  }
};

inline void scan_block(const uint8_t* codes, const uint8_t* table, int groups, int bias, int16_t scores[32]) {
  const __m256i four_bits = _mm256_set1_epi8(15), none = _mm256_setzero_si256();
  ByteSums low, high;  // of tokens 0..15 and of tokens 16..31; one group per lane of 16 bytes
  struct Entries {
    __m256i low, high;
  };
  auto look_up = [&](__m256i code, __m256i entries) -> Entries {
    asm("" : "+x"(code), "+x"(entries));
    return {_mm256_shuffle_epi8(entries, _mm256_and_si256(code, four_bits)),
            _mm256_shuffle_epi8(entries, _mm256_and_si256(_mm256_srli_epi16(code, 4), four_bits))};
  };
  auto two_groups = [&](int g) {
    return look_up(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 16 * g)),
                   _mm256_loadu_si256(reinterpret_cast<const __m256i*>(table + 16 * g)));
  };
  auto sum = [](__m256i a, __m256i b) { return _mm256_add_epi8(a, b); };
  int g = 0;
  for (; g + 8 <= groups; g += 8) {
    const Entries a = two_groups(g), b = two_groups(g + 2), c = two_groups(g + 4), d = two_groups(g + 6);
    low.add(sum(sum(a.low, b.low), sum(c.low, d.low)));
    high.add(sum(sum(a.high, b.high), sum(c.high, d.high)));
  }
  if (g < groups) {
    Entries rest = {none, none};
    for (; g < groups; g += 2) {
      const Entries e = g + 2 <= groups ? two_groups(g)
                                        : look_up(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * g))),
                                                  _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table + 16 * g))));
      rest = {sum(rest.low, e.low), sum(rest.high, e.high)};
    }
    low.add(rest.low);
    high.add(rest.high);
  }
  auto lanes = [](__m256i x, __m256i y) {  // the sum of the lanes of x, and that of y
    return _mm256_add_epi16(_mm256_permute2x128_si256(x, y, 0x20), _mm256_permute2x128_si256(x, y, 0x31));
  };
  const __m256i shift = _mm256_set1_epi16(int16_t(bias)), odd = lanes(low.odd, high.odd);
  const __m256i even = _mm256_sub_epi16(lanes(low.both, high.both), _mm256_slli_epi16(odd, 8));
  const __m256i e = _mm256_add_epi16(even, shift), o = _mm256_add_epi16(odd, shift);
  const __m256i first = _mm256_unpacklo_epi16(e, o), second = _mm256_unpackhi_epi16(e, o);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(scores), _mm256_permute2x128_si256(first, second, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(scores + 16), _mm256_permute2x128_si256(first, second, 0x31));
}

// For each set of 8 tokens: those in it, ascending, a byte each.
constexpr std::array<uint64_t, 256> kMembers = [] {
  std::array<uint64_t, 256> all{};
  for (int set = 0; set < 256; ++set)
    for (int i = 0, n = 0; i < 8; ++i)
      if (set >> i & 1) all[size_t(set)] |= uint64_t(i) << 8 * n++;
  return all;
}();

// As in collect.h, 32 scores at a time: comparisons become bits, and the members of 8 of them come from a table.
inline int collect(const int16_t* scores, int count, int threshold, int equal, int first, int32_t* out) {
  const __m256i limit = _mm256_set1_epi16(int16_t(threshold));
  auto bits = [](__m256i a, __m256i b) {
    return uint32_t(_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xD8)));
  };
  int found = 0;
  for (int i = 0; i < count; i += 32) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scores + i));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scores + i + 16));
    uint32_t taken = bits(_mm256_cmpgt_epi16(a, limit), _mm256_cmpgt_epi16(b, limit));
    if (equal > 0) {
      uint32_t same = bits(_mm256_cmpeq_epi16(a, limit), _mm256_cmpeq_epi16(b, limit));
      for (; same != 0 && equal > 0; same &= same - 1, --equal) taken |= same & -same;
    }
    for (int eight = 0; eight < 32; eight += 8, taken >>= 8) {
      const __m256i member = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(kMembers[taken & 255])));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + found), _mm256_add_epi32(member, _mm256_set1_epi32(first + i + eight)));
      found += __builtin_popcount(taken & 255);
    }
  }
  return found;
}

}  // namespace
