// Merges a row's results of sinks and tail with those of the compressed body, turns the latter back, and writes y.
#pragma once
#include "attend.cuh"
#include "hadamard.cuh"

namespace edgekv {
namespace cuda {

constexpr int kCombineThreads = 64;
EDGEKV_HOST_DEVICE size_t combine_packed_shared_bytes(const LayerParams& p) { return sizeof(float) * p.value_dim; }

// Number d of the merged results of a row, with the maximum and sum of their softmax.
struct Combined {
  float value, maximum, sum;
};
EDGEKV_DEVICE void add_part(Combined& c, const float* part, int d, int value_dim) {
  const Merge m = merge(c.maximum, part[value_dim]);
  c.maximum = m.maximum;
  c.sum = merged(m, c.sum, part[value_dim + 1]);
  c.value = merged(m, c.value, part[d]);
}

// Grid (T * q_heads), kCombineThreads threads. s: of the sinks' view, body_splits those of the body.
struct Combination {
  Step s;
  int body_splits;
};
__global__ void __launch_bounds__(kCombineThreads) combine_packed(const Combination given) {
  EDGEKV_SHARED(shared);
  float* body = reinterpret_cast<float*>(shared);
  const Step& s = given.s;
  const LayerParams& p = s.layer.p;
  const Tail tail = read_step(s);
  if (!tail.ok) return;  // attend has written y
  const int row = int(blockIdx.x), lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const size_t rows = size_t(s.rows) * p.q_heads, width = p.value_dim + 2;
  const Combined nothing{0.0f, negative_infinity(), 0.0f};
  Combined of_body = nothing;
  for (int d = int(threadIdx.x); d < p.value_dim; d += kCombineThreads) {
    of_body = nothing;
    for (int index = 0; index < (s.walks ? 1 : given.body_splits); ++index) add_part(of_body, s.body_part + (index * rows + row) * width, d, p.value_dim);
    body[d] = of_body.value;
  }
  __syncthreads();
  if (warp == 0) warp_hadamard(body, p.value_dim, lane);
  __syncthreads();
  for (int d = int(threadIdx.x); d < p.value_dim; d += kCombineThreads) {
    Combined all = nothing;
    const int splits = s.walks ? 1 : splits_of(p.body_slots, s.split) + splits_of(p.tail_slots, s.split);
    for (int index = 0; index < splits; ++index) {
      const Slots slots = slots_of(s, tail, index);
      if (s.walks || slots.begin < slots.end) add_part(all, s.part + (index * rows + row) * width, d, p.value_dim);
    }
    const Merge m = merge(all.maximum, of_body.maximum);
    const float sum = merged(m, all.sum, of_body.sum), value = merged(m, all.value, body[d]);
    store_activation(s, s.y, (long long)row * p.value_dim + d, sum > 0.0f ? value / sum : 0.0f);
  }
}

}  // namespace cuda
}  // namespace edgekv
