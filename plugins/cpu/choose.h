// The best of many scores, ties to the lowest slot: the threshold by bisection, then one pass that collects. No histogram: counting
// is one comparison per vector, and 16 bits need at most 16 passes.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

constexpr int kLowestScore = -16384;  // of 16 bits; what is below it is padding

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
// It lies in [low, high): `want` reach low, and *above, which are fewer, high.
template <class T>
inline int bisect(const T* scores, int count, int want, int64_t low, int64_t high, int* above) {
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

template <class T>
inline T highest(const T* scores, int count) {
  T most = scores[0];
  for (int i = 0; i < count; ++i) most = scores[i] > most ? scores[i] : most;
  return most;
}

template <class T>
inline int threshold_for(const T* scores, int count, int want, int* above) {
  const T most = highest(scores, count);
  T least = scores[0];
  for (int i = 0; i < count; ++i) least = scores[i] < least ? scores[i] : least;
  if (sizeof(T) == 2 && least < kLowestScore) least = T(kLowestScore);
  *above = 0;
  return bisect(scores, count, want, least, int64_t(most) + 1, above);
}

// The same of whole blocks of 32 scores. Of many, a sample says first between which two thresholds it is to be looked for; what it says is counted
// before it is believed, so that the threshold never depends on it.
inline int threshold_of_blocks(const int16_t* scores, int count, int want, int* above) {
  constexpr int kBlock = 32, kSampled = 64, kSample = kBlock * kSampled;
  const int blocks = count / kBlock;
  if (blocks < 4 * kSampled) return threshold_for(scores, count, want, above);
  alignas(64) int16_t sample[kSample];
  for (int i = 0; i < kSampled; ++i) std::memcpy(sample + kBlock * i, scores + int64_t(i) * blocks / kSampled * kBlock, kBlock * sizeof(int16_t));
  const int expected = int(int64_t(want) * kSample / count), margin = expected / 4 + 16;  // neighbours are alike: more than chance alone would ask for
  int unused;
  int64_t low = expected + margin < kSample ? threshold_for(sample, kSample, expected + margin, &unused) : kLowestScore;
  int64_t high = expected > margin ? threshold_for(sample, kSample, expected - margin, &unused) + 1 : highest(scores, count) + 1;
  *above = expected > margin ? count_from(scores, count, int(high)) : 0;
  if (*above >= want) {
    low = high, high = int64_t(INT16_MAX) + 1, *above = 0;
  } else if (const int reached = count_from(scores, count, int(low)); reached < want) {
    high = low, low = kLowestScore, *above = reached;
  }
  return bisect(scores, count, want, low, high, above);
}

}  // namespace
