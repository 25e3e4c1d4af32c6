// Queries as the keys of a compressed body meet them: transformed, with their products with the mean keys of the intervals.
#pragma once
#include "packed_body.cuh"

namespace edgekv {
namespace cuda {

EDGEKV_HOST_DEVICE size_t turn_queries_shared_bytes(const LayerParams& p) { return sizeof(float) * p.key_dim; }

// Grid (T, q_heads), kThreads threads. Writes s.turned and s.of_mean, the latter from the interval of the oldest body token on.
__global__ void __launch_bounds__(kThreads) turn_queries(const Step s) {
  EDGEKV_SHARED(shared);
  float* x = reinterpret_cast<float*>(shared);
  const LayerParams& p = s.layer.p;
  const Tail tail = read_step(s);
  if (!tail.ok || tail.body == 0) return;
  const int t = int(blockIdx.x), head = int(blockIdx.y), lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const PackedBody b = packed_body(s.layer, head / (p.q_heads / p.kv_heads), tail.base);
  const size_t row = size_t(t) * p.q_heads + head;
  const int oldest = interval_of(b, b.positions[0]);
  if (s.body_part && threadIdx.x == 0)  // retrieval counts its own
    atomicAdd(reinterpret_cast<unsigned long long*>(&header(s.layer)->traffic[kReadBodyMeta]), 2ull * p.key_dim * (b.intervals - oldest));
  for (int d = int(threadIdx.x); d < p.key_dim; d += kThreads) x[d] = load_query(s, t, head, d);
  __syncthreads();
  // Sixteen lanes add up an interval as a register of 16 numbers does, first each its own and then in halves: the oracle's order, on which
  // the second ranking rests.
  for (int base = oldest + 2 * warp; base < b.intervals; base += 2 * kWarps) {
    const int i = base + lane / 16;
    float sum = 0.0f;
    if (i < b.intervals)
      for (int d = lane % 16; d < p.key_dim; d += 16) sum = __fadd_rn(sum, __fmul_rn(x[d], to_float(b.mean[size_t(i) * p.key_dim + d])));
    for (int flip = 8; flip; flip >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, flip));
    if (lane % 16 == 0 && i < b.intervals) s.of_mean[row * p.intervals + i] = sum;
  }
  __syncthreads();  // nobody reads the query as it was any more
  if (warp != 0) return;
  warp_hadamard(x, p.key_dim, lane);
  for (int d = lane; d < p.key_dim; d += 32) s.turned[row * p.key_dim + d] = x[d];
}

}  // namespace cuda
}  // namespace edgekv
