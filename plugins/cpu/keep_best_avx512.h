// Copies the best candidates and their scores. See keep_best_any.h.
#pragma once
#include <immintrin.h>

#include "cpu/kept.h"

namespace {

inline int keep_best(const int32_t* rank, int count, int32_t threshold, int equal, const Kept& k, int32_t*) {
  const __m512i limit = _mm512_set1_epi32(threshold);
  int kept = 0;
  for (int i = 0; i < count; i += 16) {
    const __mmask16 there = first_lanes(count - i);
    const __m512i x = _mm512_maskz_loadu_epi32(there, rank + i);
    unsigned taken = _mm512_mask_cmpgt_epi32_mask(there, x, limit);
    if (equal > 0) {
      unsigned same = _mm512_mask_cmpeq_epi32_mask(there, x, limit);
      for (; same != 0 && equal > 0; same &= same - 1, --equal) taken |= same & -same;
    }
    const int found = __builtin_popcount(taken);
    const __mmask16 which = __mmask16(taken), to = first_lanes(found);
    auto copy = [&](const void* from, void* out) {
      _mm512_mask_storeu_epi32(out, to, _mm512_maskz_compress_epi32(which, _mm512_maskz_loadu_epi32(there, from)));
    };
    copy(k.candidates + i, k.slots + kept);
    for (int h = 0; h < k.heads; ++h) copy(k.from + h * k.from_stride + i, k.to + h * k.to_stride + kept);
    kept += found;
  }
  return kept;
}

}  // namespace
