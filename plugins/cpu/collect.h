// Picks slots by score without vector instructions that pack lanes. Included by the lookup_*.h that have none.
#pragma once
#include <cstdint>

namespace {

// Writes first + i for every score i above the threshold and for the first `equal` of those that are exactly it, ascending;
// returns how many. count is a multiple of 32; `out` has room for 32 more.
inline int collect(const int16_t* scores, int count, int threshold, int equal, int first, int32_t* out) {
  int found = 0;
  for (int i = 0; i < count; ++i) {
    const bool same = scores[i] == threshold && equal > 0;
    out[found] = first + i;
    found += scores[i] > threshold || same;
    equal -= same;
  }
  return found;
}

}  // namespace
