// The Walsh-Hadamard transform of a head, in blocks of the largest power of two that divides its length (docs/self_index.md).
// Butterflies of 1, 2, 4, .. numbers apart, then the factor: the order decides the last bit, and it is the oracle's.
#pragma once
#include <cmath>

namespace {

template <int kDistance>
inline Vec butterfly(Vec x) {
  alignas(64) static const float sign[16] = {1, kDistance & 1 ? -1 : 1, kDistance & 2 ? -1 : 1, kDistance & 3 ? -1 : 1,
                                             kDistance & 4 ? -1 : 1, kDistance & 5 ? -1 : 1, kDistance & 6 ? -1 : 1, kDistance & 7 ? -1 : 1,
                                             kDistance & 8 ? -1 : 1, kDistance & 9 ? -1 : 1, kDistance & 10 ? -1 : 1, kDistance & 11 ? -1 : 1,
                                             kDistance & 12 ? -1 : 1, kDistance & 13 ? -1 : 1, kDistance & 14 ? -1 : 1, kDistance & 15 ? -1 : 1};
  return add(swap_lanes<kDistance>(x), mul(x, load(sign)));
}

// The transform of x [dim], in place. Numbers behind x [dim - 1] are not touched.
inline void hadamard(float* x, int dim) {
  const int block = dim & -dim;
  for (int i = 0; i < dim; i += 16) {
    const int lanes = dim - i < 16 ? dim - i : 16;
    Vec v = lanes == 16 ? load(x + i) : load_first(x + i, lanes);
    if (block >= 2) v = butterfly<1>(v);
    if (block >= 4) v = butterfly<2>(v);
    if (block >= 8) v = butterfly<4>(v);
    if (block >= 16) v = butterfly<8>(v);
    if (block <= 16) v = mul(v, splat(1.0f / std::sqrt(float(block))));
    if (lanes == 16)
      store(x + i, v);
    else
      store_first(x + i, v, lanes);
  }
  for (int half = 16; half < block; half *= 2) {
    const Vec factor = splat(half * 2 == block ? 1.0f / std::sqrt(float(block)) : 1.0f);
    for (int i = 0; i < dim; i += 2 * half) {
      for (int j = i; j < i + half; j += 16) {
        const Vec a = load(x + j), b = load(x + j + half);
        store(x + j, mul(add(a, b), factor));
        store(x + j + half, mul(sub(a, b), factor));
      }
    }
  }
}

}  // namespace
