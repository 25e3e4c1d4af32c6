// Groups of 32 numbers as 2, 4 or 8-bit codes with a zero point and a scale in fp16 (docs/self_index.md): a warp takes a group, a lane
// a number. The order of additions is the oracle's and plugins/cpu/quantise.h's, so that codes and pairs are theirs bit for bit.
#pragma once
#include "numbers.cuh"

namespace edgekv {
namespace cuda {

EDGEKV_DEVICE float warp_min(float v) { return -warp_max(-v); }

// Sum of 32 numbers: eight running sums, folded as a tree. The same in every lane.
EDGEKV_DEVICE float sum_of_group(float x, int lane) {
  float sum = __shfl_sync(kFullWarp, x, lane % 8);
  for (int at = 8; at < 32; at += 8) sum = __fadd_rn(sum, __shfl_sync(kFullWarp, x, lane % 8 + at));
  for (int flip = 1; flip < 8; flip *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, flip));
  return sum;
}

EDGEKV_DEVICE float nearest_code(float y, float zero, float scale, float levels) {
  float x = __fadd_rn(y, -zero) / (scale > 0.0f ? scale : 1.0f);
  const float most = scale > 0.0f ? levels : 0.0f;
  x = x > 0.0f ? x : 0.0f;
  return rintf(x < most ? x : most);
}

// y: this lane's number. Writes the group's 4 * bits bytes of codes and its pair; unbiased: scaled such that the stored numbers s keep
// y . s = y . y (docs/self_index.md says why keys need that).
EDGEKV_DEVICE void quantise_group(float y, int bits, bool unbiased, int lane, unsigned char* codes, __half* pair) {
  const float levels = float((1 << bits) - 1), least = warp_min(y), most = warp_max(y);
  float code = nearest_code(y, least, __fadd_rn(most, -least) / levels, levels);
  const float middle = sum_of_group(code, lane) / 32.0f, centred = __fadd_rn(code, -middle);
  const float spread = sum_of_group(__fmul_rn(centred, centred), lane), product = sum_of_group(__fmul_rn(centred, y), lane);
  const float mean = sum_of_group(y, lane) / 32.0f;
  const float slope = spread > 0.0f ? product / spread : 0.0f;
  __half scale = from_float<__half>(slope);
  __half zero = from_float<__half>(spread > 0.0f ? __fadd_rn(mean, -__fmul_rn(slope, middle)) : least);
  code = nearest_code(y, to_float(zero), to_float(scale), levels);
  if (unbiased) {
    const float stored = __fadd_rn(to_float(zero), __fmul_rn(to_float(scale), code));
    const float square = sum_of_group(__fmul_rn(y, y), lane), along = sum_of_group(__fmul_rn(y, stored), lane);
    const float factor = along > 0.0f ? square / along : 1.0f;
    zero = from_float<__half>(__fmul_rn(to_float(zero), factor));
    scale = from_float<__half>(__fmul_rn(to_float(scale), factor));
  }
  const int bytes = 4 * bits;
  unsigned byte = 0;
  for (int i = 0; i < 8 / bits; ++i) byte |= unsigned(int(__shfl_sync(kFullWarp, code, (i * bytes + lane) % 32))) << (bits * i);
  if (lane < bytes) codes[lane] = static_cast<unsigned char>(byte);
  if (lane == 0) pair[0] = zero, pair[1] = scale;
}

}  // namespace cuda
}  // namespace edgekv
