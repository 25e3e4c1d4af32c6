// Merges the splits of one row in slot order (attend.cuh) and writes y.
#pragma once
#include "attend.cuh"

namespace edgekv {
namespace cuda {

// Grid (T * q_heads), any block size.
__global__ void combine(const Step s) {
  const LayerParams& p = s.layer.p;
  const Tail tail = read_step(s);
  if (!tail.ok) return;  // attend has written y
  const int row = int(blockIdx.x), splits = splits_of(p.body_slots, s.split) + splits_of(p.tail_slots, s.split);
  for (int d = int(threadIdx.x); d < p.value_dim; d += int(blockDim.x)) {
    float running = 0.0f, maximum = negative_infinity(), sum = 0.0f;
    for (int index = 0; index < splits; ++index) {
      const Slots slots = slots_of(s, tail, index);
      if (slots.begin >= slots.end) continue;
      const float* part = s.part + (size_t(index) * s.rows * p.q_heads + row) * (p.value_dim + 2);
      const Merge m = merge(maximum, part[p.value_dim]);
      maximum = m.maximum;
      sum = merged(m, sum, part[p.value_dim + 1]);
      running = merged(m, running, part[d]);
    }
    store_activation(s, s.y, (long long)row * p.value_dim + d, sum > 0.0f ? running / sum : 0.0f);
  }
}

}  // namespace cuda
}  // namespace edgekv
