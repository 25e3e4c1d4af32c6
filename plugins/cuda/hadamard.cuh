// The Walsh-Hadamard transform of a head, in blocks of the largest power of two that divides its length (docs/self_index.md).
// Butterflies of 1, 2, 4, .. numbers apart, then the factor: the order decides the last bit, and it is the oracle's.
#pragma once
#include "numbers.cuh"

namespace edgekv {
namespace cuda {

// 1 / sqrt(block), rounded once.
EDGEKV_DEVICE float hadamard_factor(int block) {
  float factor = 1.0f;
  for (; block > 2; block /= 4) factor *= 0.5f;
  return block == 2 ? factor * 0.70710678118654752f : factor;
}

// Transforms x [dim] in shared memory, in place, by the 32 lanes of one warp. What other warps wrote must be visible already; the
// result is visible to this warp.
EDGEKV_DEVICE void warp_hadamard(float* x, int dim, int lane) {
  const int block = dim & -dim;
  const float factor = hadamard_factor(block);
  for (int half = 1; half < block; half *= 2) {
    const float scale = 2 * half == block ? factor : 1.0f;
    for (int i = lane; i < dim / 2; i += 32) {
      const int at = i / half * 2 * half + i % half;
      const float a = x[at], b = x[at + half];
      x[at] = __fmul_rn(__fadd_rn(a, b), scale);
      x[at + half] = __fmul_rn(__fadd_rn(a, -b), scale);
    }
    __syncwarp();
  }
}

}  // namespace cuda
}  // namespace edgekv
