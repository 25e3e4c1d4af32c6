// Copies the best candidates and their scores, in plain C++.
#pragma once
#include "cpu/kept.h"

namespace {

// Keeps the candidates whose rank [count] is above the threshold and the first `equal` of those that have exactly it, in order; returns how
// many. which [count]: working memory.
inline int keep_best(const int32_t* rank, int count, int32_t threshold, int equal, const Kept& k, int32_t* which) {
  int kept = 0;
  for (int i = 0; i < count; ++i) {
    const bool same = rank[i] == threshold && equal > 0;
    which[kept] = i;
    kept += rank[i] > threshold || same;
    equal -= same;
  }
  for (int i = 0; i < kept; ++i) k.slots[i] = k.candidates[which[i]];
  for (int h = 0; h < k.heads; ++h)
    for (int i = 0; i < kept; ++i) k.to[h * k.to_stride + i] = k.from[h * k.from_stride + which[i]];
  return kept;
}

}  // namespace
