// The best of many by an unsigned key: the threshold by radix, 8 bits at a time from the top. Counts are integers, so the order of the
// atomics does not matter. Blocks of kChooseThreads threads.
#pragma once
#include "numbers.cuh"

namespace edgekv {
namespace cuda {

constexpr int kChooseThreads = 256;
constexpr size_t kChooseSharedBytes = 4 * (256 + kChooseThreads / 32 + 3);

// Shared memory of a selection, kChooseSharedBytes.
struct Selection {
  int *histogram, *scratch, *found;
  explicit EDGEKV_DEVICE Selection(unsigned char* shared)
      : histogram(reinterpret_cast<int*>(shared)), scratch(histogram + 256), found(scratch + kChooseThreads / 32) {}
};

// Number of set flags before this thread in the block; *all receives the block's total. scratch: one int per warp.
EDGEKV_DEVICE int count_before(bool flag, int* scratch, int* all) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const unsigned bits = __ballot_sync(kFullWarp, flag);
  if (lane == 0) scratch[warp] = __popc(bits);
  __syncthreads();
  int before = __popc(bits & ((1u << lane) - 1u));
  *all = 0;
  for (int w = 0; w < kChooseThreads / 32; ++w) {
    if (w < warp) before += scratch[w];
    *all += scratch[w];
  }
  __syncthreads();  // the scratch may be used again
  return before;
}

struct Threshold {
  unsigned key;  // of the need-th best
  int better;    // how many have a larger key
  int equal;     // how many have this one
};

// key(i) of the candidates [first, last) has `bits` bits, a multiple of 8. At least `need` candidates, need > 0.
template <typename Key>
EDGEKV_DEVICE Threshold find_threshold(const Selection& s, int first, int last, int need, int bits, const Key& key) {
  unsigned prefix = 0;
  int above = 0;
  for (int shift = bits - 8; shift >= 0; shift -= 8) {
    for (int i = int(threadIdx.x); i < 256; i += kChooseThreads) s.histogram[i] = 0;
    __syncthreads();
    for (int i = first + int(threadIdx.x); i < last; i += kChooseThreads) {
      const unsigned k = key(i);
      if (shift == bits - 8 || k >> (shift + 8) == prefix) atomicAdd(&s.histogram[k >> shift & 255u], 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int bin = 255, count = above;
      while (bin > 0 && count + s.histogram[bin] < need) count += s.histogram[bin--];
      s.found[0] = bin;
      s.found[1] = count;
      s.found[2] = s.histogram[bin];
    }
    __syncthreads();
    prefix = prefix << 8 | unsigned(s.found[0]);
    above = s.found[1];
  }
  return {prefix, above, s.found[2]};
}

}  // namespace cuda
}  // namespace edgekv
