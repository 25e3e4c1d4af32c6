// Products of stored keys with query heads in whole numbers, in plain C++: the definition of what key_dots_avx2.h does.
#pragma once
#include <cmath>

#include "cpu/ranking.h"

namespace {

// Rounded to a whole number of 16 bits; what is none is the lowest.
inline int16_t to_int16(float x) { return x >= -32768.0f && x < 32767.5f ? int16_t(std::nearbyint(x)) : INT16_MIN; }

// Level of a code, the bits of its group's zero point and scale below it shifted out.
inline int level_of(int16_t zero_point, int16_t scale, int code) {
  const int level = int16_t(zero_point + scale * code) >> kLevelShift;
  return level < 0 ? 0 : level < kMostLevel ? level : kMostLevel;
}

// A token's key as whole numbers [groups * 32], odd, from -127 to 127; returns its largest magnitude.
template <int kBits>
inline float whole_key(const PackedBody& b, const uint8_t* record, const uint8_t* signs, int8_t* out) {
  const int groups = b.key_groups();
  float pair[64 + kLanes], largest = 0;
  const uint16_t* pairs = reinterpret_cast<const uint16_t*>(record + b.record.key_pairs);
  for (int i = 0; i < 2 * groups; i += kLanes) store(pair + i, load(pairs + i));  // what is read behind the last is the next record or plane
  for (int g = 0; g < groups; ++g) {
    const float top = pair[2 * g] + pair[2 * g + 1] * float((1 << kBits) - 1);
    largest = top > largest ? top : largest;
  }
  const float factor = largest > 0 ? kLargestKey / largest : 0.0f;
  for (int g = 0; g < groups; ++g, record += 4 * kBits, out += 32) {
    const int16_t zero_point = to_int16(pair[2 * g] * factor), scale = to_int16(pair[2 * g + 1] * factor);
    uint32_t positive;
    std::memcpy(&positive, signs + 4 * g, 4);
    for (int i = 0; i < 8 / kBits; ++i)
      for (int j = 0; j < 4 * kBits; ++j) {
        const int n = 4 * kBits * i + j, number = 2 * level_of(zero_point, scale, record[j] >> kBits * i & ((1 << kBits) - 1)) + 1;
        out[n] = int8_t(positive >> n & 1 ? number : -number);
      }
  }
  return largest;
}

// Products of the candidates' keys with the query heads, whole numbers: out [group][stride], written in whole vectors; queries
// [group][dim], dim a multiple of 32. largest [count]: their largest magnitudes.
inline void key_dots(const PickedSlots& t, const int8_t* queries, const WholeQuery*, int group, int dim, float* largest, float* out, int64_t stride) {
  alignas(64) int8_t key[1024];
  uint8_t signs[128];
  for (int i = 0; i < t.count; ++i) {
    t.fetch_key_and_codes(i);
    gather_signs(t.body.index, t.body.key_dim / 4, t.slots + i, 1, signs, 4 * t.body.key_groups());
    largest[i] = t.body.key_bits == 2 ? whole_key<2>(t.body, t.record(i), signs, key) : whole_key<4>(t.body, t.record(i), signs, key);
    for (int g = 0; g < group; ++g) {
      const int8_t* q = queries + int64_t(g) * dim;
      int32_t sum = 0;
      for (int d = 0; d < dim; ++d) sum += int32_t(key[d]) * q[d];
      out[g * stride + i] = float(sum);
    }
  }
}

}  // namespace
