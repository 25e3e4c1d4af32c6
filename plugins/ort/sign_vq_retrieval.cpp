// edgekv::SignVQRetrieval for ONNX Runtime: which slots of a compressed body the rows of a step should attend to.
//
// inputs   as BoundedCacheAttention's first seven; 1 k and 2 v may be absent and are ignored
// output   slots int32 [kv_heads, T, k], ascending, -1 behind the last where a row sees fewer; k = min(retrieve, filled body slots) with
//          `retrieve` from the state's header, so that it may change from step to step; 0 (attend to everything) gives k = 0
// attributes: as BoundedCacheAttention
//
// The state is read, but for its traffic counters. The op that appends to it takes these slots and so runs later.
#include "ort/sign_vq_retrieval.h"

#include <cstdio>
#include <memory>
#include <new>
#include <vector>

#include "cpu/error.h"
#include "cpu/state.h"
#include "ort/session_threads.h"
#include "ort/step_inputs.h"

namespace edgekv::ort {
namespace {

struct Kernel {
  const Api* api;
  LayerParams params;
};

Status* refusal(const Api* api) {
  char text[600];
  snprintf(text, sizeof(text), "SignVQRetrieval: %s", error_text());
  return function<CreateStatus>(api)(kInvalidArgument, text);
}

int compute(const Kernel& kernel, KernelContext* context) {
  const LayerParams& p = kernel.params;
  Tensor input[kStepInputs];
  for (size_t i = 0; i < kStepInputs; ++i)
    if (read_input(kernel.api, context, i, &input[i])) return 1;
  StepInputs in = {};
  if (view_queries(p, input, &in)) return 1;
  const Tensor& state = input[kState];
  if (check_state(p, state.data, state.size(), in.position)) return 1;
  const int64_t shape[3] = {p.kv_heads, in.rows, retrieved_slots(p, state.data)};
  void* slots;
  if (make_output(kernel.api, context, 0, shape, 3, &slots)) return 1;
  if (shape[2] == 0) return 0;
  SessionThreads threads(kernel.api, context);
  return retrieve_step(p, in, state.data, state.size(), static_cast<int32_t*>(slots), threads);
}

Status* create_kernel(const CustomOp*, const Api* api, const KernelInfo* info, void** made) try {
  auto kernel = std::make_unique<Kernel>(Kernel{api, {}});
  std::vector<float> unused;
  if (read_params(api, info, &kernel->params, &unused)) return refusal(api);
  if (kernel->params.format != kFormatSelfIndex) {
    fail("only a compressed body can be searched: attribute format must be %d (selfindex)", kFormatSelfIndex);
    return refusal(api);
  }
  *made = kernel.release();
  return nullptr;
} catch (const std::bad_alloc&) {
  return function<CreateStatus>(api)(kFail, "SignVQRetrieval: out of memory");
}

const CustomOp* make_op() {
  static CustomOp op = {};
  op.version = kApiVersion;
  op.get_name = [](const CustomOp*) { return "SignVQRetrieval"; };
  op.get_execution_provider = [](const CustomOp*) -> const char* { return "CPUExecutionProvider"; };
  op.get_input_count = [](const CustomOp*) -> size_t { return kStepInputs; };
  op.get_input_type = [](const CustomOp*, size_t i) { return step_input_type(i); };
  op.get_input_presence = [](const CustomOp*, size_t i) { return i == kQ || i == kPosition || i == kState ? kRequired : kOptional; };
  op.get_input_memory = [](const CustomOp*, size_t) { return kMemoryDefault; };
  op.get_output_count = [](const CustomOp*) -> size_t { return 1; };
  op.get_output_type = [](const CustomOp*, size_t) { return kInt32; };
  op.get_output_presence = [](const CustomOp*, size_t) { return kRequired; };
  op.create_kernel_v2 = create_kernel;
  op.kernel_compute_v2 = [](void* made, KernelContext* context) -> Status* {
    const Kernel& kernel = *static_cast<const Kernel*>(made);
    return compute(kernel, context) == 0 ? nullptr : refusal(kernel.api);
  };
  op.kernel_destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.get_start_version = [](const CustomOp*) { return 1; };
  op.get_end_version = [](const CustomOp*) { return 1; };
  op.get_alias_map = [](int**, int**) -> size_t { return 0; };
  op.release_alias_map = [](int*, int*) {};
  return &op;
}

}  // namespace

const CustomOp* sign_vq_retrieval() {
  static const CustomOp* op = make_op();
  return op;
}

}  // namespace edgekv::ort
