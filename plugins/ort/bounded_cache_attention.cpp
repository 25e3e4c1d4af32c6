// edgekv::BoundedCacheAttention for ONNX Runtime.
//
// inputs   0 q float32 [1, q_heads, T, key_dim] or [1, T, q_heads * key_dim]; 1 k and 2 v likewise with kv_heads, each in its own
//          order. Without k and v, q holds all three: [1, T, q_heads * key_dim + kv_heads * (key_dim + value_dim)].
//          3 position int64 [1]; 4 state int8 [bytes]; with fused_rotary 5 cos and 6 sin float32 [1, T, rotary_dim/2 or rotary_dim]
//          7 slots int32 [kv_heads, T, k], what each row attends to of a compressed body (sign_vq_retrieval.cpp); absent or empty: all
// outputs  0 y float32 [1, T, q_heads * value_dim]; 1 state, which must be the same memory as input 4
// attributes: the fields of layout/attributes.def, inv_freq (floats), plugin_namespace and plugin_version (for TensorRT, unused here)
#include "ort/bounded_cache_attention.h"

#include <cinttypes>
#include <vector>

#include "cpu/attention.h"
#include "ort/cpu_op.h"
#include "ort/session_threads.h"
#include "ort/step_inputs.h"

namespace edgekv::ort {
namespace {

constexpr size_t kSlots = kStepInputs, kInputs = kStepInputs + 1;

struct Kernel {
  static constexpr const char* kName = "BoundedCacheAttention";
  const Api* api;
  LayerParams p;
  std::vector<float> inv_freq;
  int create(const KernelInfo* info) { return read_params(api, info, &p, &inv_freq); }
  int compute(KernelContext* context) const;
};

int Kernel::compute(KernelContext* context) const {
  Tensor input[kInputs];
  for (size_t i = 0; i < kInputs; ++i)
    if (read_input(api, context, i, &input[i])) return 1;

  StepInputs in = {};
  if (view_step(p, input, &in)) return 1;
  if (const Tensor& slots = input[kSlots]; slots.data != nullptr) {
    if (slots.rank != 3 || slots.dims[0] != p.kv_heads || slots.dims[1] != in.rows)
      return fail("slots must have the shape [%d, %" PRId64 ", k]", p.kv_heads, in.rows);
    in.slots = static_cast<const int32_t*>(slots.data);
    in.chosen = slots.dims[2];
  }

  const Tensor& state = input[kState];
  void *y, *same;
  const int64_t shape[3] = {1, in.rows, int64_t(p.q_heads) * p.value_dim};
  if (make_output(api, context, 1, state.dims, state.rank, &same)) return 1;
  if (state.data == nullptr || same != state.data)
    return fail("the state must be updated in place: bind the state input and the state output of layer %d to one buffer", p.layer);
  if (make_output(api, context, 0, shape, 3, &y)) return 1;
  SessionThreads threads(api, context);
  return attend_step(p, in, state.data, state.size(), static_cast<float*>(y), threads);
}

const CustomOp* make_op() {
  static CustomOp op = cpu_op<Kernel>();
  op.get_input_count = [](const CustomOp*) -> size_t { return kInputs; };
  op.get_input_type = [](const CustomOp*, size_t i) { return i == kSlots ? kInt32 : step_input_type(i); };
  op.get_input_presence = [](const CustomOp*, size_t i) { return step_input_presence(i); };
  op.get_output_count = [](const CustomOp*) -> size_t { return 2; };
  op.get_output_type = [](const CustomOp*, size_t i) { return i == 0 ? kFloat : kInt8; };
  op.get_alias_map = [](int** inputs, int** outputs) -> size_t {
    static int from = kState, to = 1;
    *inputs = &from;
    *outputs = &to;
    return 1;
  };
  return &op;
}

}  // namespace

const CustomOp* bounded_cache_attention() {
  static const CustomOp* op = make_op();
  return op;
}

}  // namespace edgekv::ort
