// The best of many scores, ties to the lowest slot: the threshold by bisection, then one pass that collects. No histogram: counting
// is one comparison per vector, and 16 bits need at most 16 passes.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

inline int count_from(const int16_t* scores, int count, int least) {
  int total = 0;
  const int16_t limit = int16_t(least);
  for (int at = 0; at < count; at += 16384) {  // so that sums of 16 bits cannot overflow
    const int size = count - at < 16384 ? count - at : 16384;
    int16_t part = 0;
    for (int i = 0; i < size; ++i) part = int16_t(part + (scores[at + i] >= limit));
    total += part;
  }
  return total;
}

inline int count_from(const int32_t* scores, int count, int32_t least) {
  int total = 0;
  for (int i = 0; i < count; ++i) total += scores[i] >= least;
  return total;
}

// The largest threshold that at least `want` scores reach, 0 < want <= count; *above: how many exceed it, or fewer when all that reach it are wanted.
template <class T>
inline int threshold_for(const T* scores, int count, int want, int* above) {
  T least = scores[0], most = scores[0];
  for (int i = 0; i < count; ++i) {
    least = scores[i] < least ? scores[i] : least;
    most = scores[i] > most ? scores[i] : most;
  }
  if (sizeof(T) == 2 && least < -16384) least = T(-16384);  // padding, lower than any score
  int64_t low = least, high = int64_t(most) + 1;  // count_from(low) >= want > count_from(high)
  *above = 0;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    const int reached = count_from(scores, count, T(middle));
    if (reached == want) return int(middle);  // all that reach it stay: none of them need be counted as above it
    if (reached > want) {
      low = middle;
    } else {
      high = middle;
      *above = reached;
    }
  }
  return int(low);
}

}  // namespace
