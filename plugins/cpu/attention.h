// One attention step of one layer: check, append to the tail, attend to body and tail.
#pragma once
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace edgekv {

struct StepInputs {
  Rows q, k, v;
  int64_t rows;             // tokens in this step
  int64_t position;         // committed tokens before it
  const float *cos, *sin;   // [rows][table_columns] when params.fused_rotary, else null
  int64_t table_columns;    // rotary_dim / 2, or rotary_dim of which the first half is used
};

// Writes y [rows][q_heads][value_dim] and the tail of `state`. Returns 0, or 1 with a sentence (error.h) and nothing changed.
// The result does not depend on how `parallel` distributes the work, nor a row's on the rows beside it, to the last bit.
int attend_step(const LayerParams& params, const StepInputs& in, void* state, int64_t bytes, float* y, Parallel& parallel);

}  // namespace edgekv
