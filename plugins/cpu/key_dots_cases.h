// key_dots for the bits, groups and query heads there are, by the dots_of_heads in front of this.
#pragma once
#include <cstdint>

#include "cpu/picked_slots.h"

namespace {

template <int kBits, int kGroups>
inline void dots_of_bits(const PickedSlots& t, const int8_t* queries, const WholeQuery* whole, int group, int dim, float* largest, float* out, int64_t stride) {
  for (int g = 0; g < group; g += 4) {
    const int8_t* q = queries + int64_t(g) * dim;
    float* to = out + g * stride;
    switch (group - g) {
      case 1: dots_of_heads<1, kBits, kGroups>(t, q, whole + g, dim, largest, to, stride); break;
      case 2: dots_of_heads<2, kBits, kGroups>(t, q, whole + g, dim, largest, to, stride); break;
      case 3: dots_of_heads<3, kBits, kGroups>(t, q, whole + g, dim, largest, to, stride); break;
      default: dots_of_heads<4, kBits, kGroups>(t, q, whole + g, dim, largest, to, stride);
    }
  }
}

template <int kBits>
inline void dots_of_groups(const PickedSlots& t, const int8_t* queries, const WholeQuery* whole, int group, int dim, float* largest, float* out, int64_t stride) {
  switch (t.body.key_groups()) {
    case 2: return dots_of_bits<kBits, 2>(t, queries, whole, group, dim, largest, out, stride);
    case 4: return dots_of_bits<kBits, 4>(t, queries, whole, group, dim, largest, out, stride);
    default: return dots_of_bits<kBits, 0>(t, queries, whole, group, dim, largest, out, stride);
  }
}

inline void key_dots(const PickedSlots& t, const int8_t* queries, const WholeQuery* whole, int group, int dim, float* largest, float* out, int64_t stride) {
  t.body.key_bits == 2 ? dots_of_groups<2>(t, queries, whole, group, dim, largest, out, stride)
                       : dots_of_groups<4>(t, queries, whole, group, dim, largest, out, stride);
}

}  // namespace
