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
  for (int d = int(threadIdx.x); d < p.key_dim; d += kThreads) x[d] = load_rotated(s, s.q, t, head, d);
  __syncthreads();
  for (int i = oldest + warp; i < b.intervals; i += kWarps) {
    const __half* mean = b.mean + size_t(i) * p.key_dim;
    float sum = 0.0f;
    for (int d = lane; d < p.key_dim; d += 32) sum = fmaf(x[d], to_float(mean[d]), sum);
    sum = warp_sum(sum);
    if (lane == 0) s.of_mean[row * p.intervals + i] = sum;
  }
  __syncthreads();  // nobody reads the query as it was any more
  if (warp != 0) return;
  warp_hadamard(x, p.key_dim, lane);
  for (int d = lane; d < p.key_dim; d += 32) s.turned[row * p.key_dim + d] = x[d];
}

}  // namespace cuda
}  // namespace edgekv
