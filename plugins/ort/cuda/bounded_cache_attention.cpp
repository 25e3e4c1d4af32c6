// edgekv::BoundedCacheAttention for ONNX Runtime's CUDA provider: inputs, outputs and attributes as plugins/ort/bounded_cache_attention.cpp has
// them, everything in device memory. Without compressed bodies and thin keys, so without inputs 7 to 11.
//
// What only the device can see (a damaged state, rows beyond the boundary) leaves the state alone and makes y NaN, see cuda/api.h.
#include <vector>

#include "cuda/api.h"
#include "ort/cuda/cuda_op.h"
#include "ort/step_inputs.h"

namespace edgekv::ort {
namespace {

struct Kernel {
  static constexpr const char* kName = "BoundedCacheAttention";
  const Api* api;
  LayerParams p;
  int create(const KernelInfo* info);
  int compute(KernelContext* context) const;
};

int Kernel::create(const KernelInfo* info) {
  std::vector<float> unused;
  if (read_params(api, info, &p, &unused)) return 1;
  if (p.format != kFormatDense || p.head_dim || p.latent) return fail("compressed caches and thin keys run on the CPU provider");
  return 0;
}

EdgekvRows rows_of(const Rows& x) { return {x.data, x.row_stride, x.head_stride}; }

int Kernel::compute(KernelContext* context) const {
  Tensor input[kAttentionInputs];
  for (size_t i = 0; i < kAttentionInputs; ++i)
    if (read_input(api, context, i, &input[i])) return 1;
  StepInputs in = {};
  if (view_step(p, input, &in)) return 1;
  if (input[kSlots].data != nullptr) return fail("slots belong to a compressed cache");
  const Tensor& state = input[kState];
  if (state.size() != int64_t(state_layout(p).bytes)) return fail("the state has not the size that the attributes ask for");
  void *y, *stream, *workspace;
  if (make_step_outputs(api, context, p, state, in.rows, &y) || stream_of(api, context, &stream)) return 1;
  EdgekvStep step = {};
  step.q = rows_of(in.q);
  step.k = rows_of(in.k);
  step.v = rows_of(in.v);
  step.rows = int(in.rows);
  step.cos = in.cos;
  step.sin = in.sin;
  step.table = int(in.table_columns);
  step.position = static_cast<const long long*>(input[kPosition].data);
  step.y = y;
  if (in.rows > p.tail_slots) return fail("a step has at most %d rows, the slots of the tail", p.tail_slots);
  Scratch scratch(api, context);
  if (scratch.take(size_t(edgekv_cuda_step_workspace(&p, step.rows)), &workspace)) return 1;
  return edgekv_cuda_step(&p, state.data, &step, workspace, stream) ? fail("%s", edgekv_cuda_last_error()) : 0;
}

}  // namespace

const CustomOp* cuda_bounded_cache_attention() {
  static const CustomOp op = [] {
    CustomOp made = cuda_op<Kernel>();
    declare_attention(&made);
    return made;
  }();
  return &op;
}

}  // namespace edgekv::ort
