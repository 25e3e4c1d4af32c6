// Small kernels, right and wrong, that the emulation itself is tested with.
#include "cuda/numbers.cuh"

using namespace edgekv::cuda;

struct Probe {
  const float* in;
  float* out;
  int n;
};

// Sum of each block's 64 numbers by a tree in shared memory.
__global__ void tree_sum(const Probe p) {
  EDGEKV_SHARED(shared);
  float* x = reinterpret_cast<float*>(shared);
  const int i = int(threadIdx.x);
  x[i] = p.in[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  for (int half = int(blockDim.x) / 2; half; half /= 2) {
    if (i < half) x[i] += x[i + half];
    __syncthreads();
  }
  if (i == 0) p.out[blockIdx.x] = x[0];
}

// The same with warp shuffles; ballot counts the positive numbers.
__global__ void warp_tree(const Probe p) {
  const float v = p.in[threadIdx.x];
  const unsigned positive = __ballot_sync(kFullWarp, v > 0);
  const float sum = warp_sum(v), third = __shfl_sync(kFullWarp, v, 3);
  p.out[threadIdx.x * 3] = sum;
  p.out[threadIdx.x * 3 + 1] = float(__popc(positive));
  p.out[threadIdx.x * 3 + 2] = third;
}

// Reads what an asynchronous copy brings, after waiting for it.
__global__ void staged(const Probe p) {
  EDGEKV_SHARED(shared);
  float* x = reinterpret_cast<float*>(shared);
  copy_async_16(x + threadIdx.x * 4, p.in + threadIdx.x * 4);
  copy_commit();
  EDGEKV_COPY_WAIT(0);
  __syncthreads();
  p.out[threadIdx.x] = x[(threadIdx.x * 5 + 1) % (blockDim.x * 4)];
}

__global__ void half_the_block_waits(const Probe p) {
  if (threadIdx.x < 32) __syncthreads();
  p.out[threadIdx.x] = 1;
}

__global__ void waits_in_two_places(const Probe p) {
  if (threadIdx.x < 32) __syncthreads();
  else
    __syncthreads();
  p.out[threadIdx.x] = 1;
}

__global__ void writes_past_shared_memory(const Probe) {
  EDGEKV_SHARED(shared);
  shared[blockDim.x * 4 + threadIdx.x] = 1;
}

__global__ void forgets_a_copy(const Probe p) {
  EDGEKV_SHARED(shared);
  copy_async_16(shared + threadIdx.x * 16, p.in + threadIdx.x * 4);
  copy_commit();
}

__global__ void unaligned_copy(const Probe p) {
  EDGEKV_SHARED(shared);
  copy_async_16(shared + 4, p.in);
  copy_commit();
  EDGEKV_COPY_WAIT(0);
}

extern "C" int run_probe(int which, const float* in, float* out, int n, int blocks, int threads, int shared) {
  void (*kernels[])(Probe) = {tree_sum, warp_tree, staged, half_the_block_waits, waits_in_two_places, writes_past_shared_memory, forgets_a_copy, unaligned_copy};
  const Probe p{in, out, n};
  const auto kernel = kernels[which];
  EDGEKV_LAUNCH(kernel, dim3(blocks), dim3(threads), size_t(shared), nullptr, p);
  return cudaGetLastError() != cudaSuccess;
}
