// The inputs that the ops of a step share: queries, keys, values, position, state and rotary tables.
#pragma once
#include "cpu/attention.h"
#include "ort/kernel_io.h"

namespace edgekv::ort {

enum StepInput : size_t { kQ, kK, kV, kPosition, kState, kCos, kSin, kStepInputs };

inline ElementType step_input_type(size_t i) { return i == kPosition ? kInt64 : i == kState ? kInt8 : kFloat; }
inline Presence step_input_presence(size_t i) { return i == kQ || i == kPosition || i == kState ? kRequired : kOptional; }

// Both fill `in` from tensors [kStepInputs] and return 0, or 1 with a sentence (cpu/error.h). The second one ignores keys and values.
int view_step(const LayerParams& p, const Tensor* input, StepInputs* in);
int view_queries(const LayerParams& p, const Tensor* input, StepInputs* in);

}  // namespace edgekv::ort
