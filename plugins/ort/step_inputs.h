// The inputs that the ops of a step share: queries, keys, values, position, state, rotary tables and maps to thin keys.
#pragma once
#include "cpu/attention.h"
#include "ort/kernel_io.h"

namespace edgekv::ort {

enum StepInput : size_t { kQ, kK, kV, kPosition, kState, kCos, kSin, kStepInputs };

inline ElementType step_input_type(size_t i) { return i == kPosition ? kInt64 : i == kState ? kInt8 : kFloat; }
inline Presence step_input_presence(size_t i) { return i == kQ || i == kPosition || i == kState ? kRequired : kOptional; }

// Checks the map of `heads` heads to thin keys, [heads, head_dim, key_dim] of the cache's element type, and sets *map; without head_dim
// there must be none. Of the inputs, only maps may have one type or another.
int view_map(const LayerParams& p, const char* name, const Tensor& x, int64_t heads, const void** map);

// Checks what latent keys are made and rebuilt with, [kv_heads * key_dim, latent] and [kv_heads, latent + 1, key_dim], and sets it in `in`;
// without latent there must be neither.
int view_latent(const LayerParams& p, const Tensor& encode, const Tensor& decode, StepInputs* in);
// The second of them alone, with latent.
int view_decode(const LayerParams& p, const Tensor& decode, StepInputs* in);

// Both fill `in` from tensors [kStepInputs] and return 0, or 1 with a sentence (cpu/error.h). The second one ignores keys and values.
// They look at shapes and addresses only, so tensors may lie in device memory; in.position is left alone.
int view_step(const LayerParams& p, const Tensor* input, StepInputs* in);
int view_queries(const LayerParams& p, const Tensor* input, StepInputs* in);
// The position that a viewed step has, read from host memory.
inline int64_t position_of(const Tensor* input) { return *static_cast<const int64_t*>(input[kPosition].data); }

// The attention op, whatever provider runs it: five more inputs, and the state's output is the memory of its input.
constexpr size_t kSlots = kStepInputs, kQueryMap = kStepInputs + 1, kKeyMap = kStepInputs + 2, kKeyEncode = kStepInputs + 3,
                 kKeyDecode = kStepInputs + 4, kAttentionInputs = kStepInputs + 5;
void declare_attention(CustomOp* op);
// Makes both outputs, y [1, rows, q_heads * value_dim] and the state; 1 with a sentence when the state is not updated in place.
int make_step_outputs(const Api* api, KernelContext* context, const LayerParams& p, const Tensor& state, int64_t rows, void** y);

}  // namespace edgekv::ort
