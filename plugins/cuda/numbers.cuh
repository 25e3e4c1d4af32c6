// Stored numbers (float32 or float16) and activations (float32 or float16), always computed with in float32.
#pragma once
#include "platform.cuh"

namespace edgekv {
namespace cuda {

EDGEKV_DEVICE float to_float(float v) { return v; }
EDGEKV_DEVICE float to_float(__half v) { return __half2float(v); }

template <typename T>
EDGEKV_DEVICE T from_float(float v);
template <>
EDGEKV_DEVICE float from_float<float>(float v) { return v; }
template <>
EDGEKV_DEVICE __half from_float<__half>(float v) { return __float2half_rn(v); }

// Two neighbours at an even index.
EDGEKV_DEVICE float2 load_pair(const float* at) { return *reinterpret_cast<const float2*>(at); }
EDGEKV_DEVICE float2 load_pair(const __half* at) { return __half22float2(*reinterpret_cast<const __half2*>(at)); }

EDGEKV_DEVICE float warp_max(float v) {
  for (int flip = 16; flip; flip >>= 1) v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, flip));
  return v;
}
// The butterfly adds in the same order in every lane, so all lanes get the same bits.
EDGEKV_DEVICE float warp_sum(float v) {
  for (int flip = 16; flip; flip >>= 1) v = __fadd_rn(v, __shfl_xor_sync(kFullWarp, v, flip));
  return v;
}

EDGEKV_DEVICE float negative_infinity() { return __uint_as_float(0xff800000u); }
EDGEKV_DEVICE float not_a_number() { return __uint_as_float(0x7fc00000u); }

}  // namespace cuda
}  // namespace edgekv
