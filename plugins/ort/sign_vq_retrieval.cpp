// edgekv::SignVQRetrieval for ONNX Runtime: which slots of a compressed body the rows of a step should attend to.
//
// inputs   as BoundedCacheAttention's first seven; 1 k and 2 v may be absent and are ignored; 7 query_map as its input 8
// output   slots int32 [kv_heads, T, k], ascending, -1 behind the last where a row sees fewer; k = min(retrieve, filled body slots) with
//          `retrieve` from the state's header, so that it may change from step to step; 0 (attend to everything) gives k = 0. After a
//          second ranking [kv_heads, T, 1 + q_heads / kv_heads, k]: the slots of a row and the bits of their float32 scores
// attributes: as BoundedCacheAttention
//
// The state is read, but for its traffic counters. The op that appends to it takes these slots and so runs later.
#include "ort/sign_vq_retrieval.h"

#include <vector>

#include "cpu/state.h"
#include "ort/custom_op.h"
#include "ort/session_threads.h"
#include "ort/step_inputs.h"

namespace edgekv::ort {
namespace {

constexpr size_t kMap = kStepInputs, kInputs = kStepInputs + 1;

struct Kernel {
  static constexpr const char* kName = "SignVQRetrieval";
  const Api* api;
  LayerParams p;
  int create(const KernelInfo* info);
  int compute(KernelContext* context) const;
};

int Kernel::create(const KernelInfo* info) {
  std::vector<float> unused;
  if (read_params(api, info, &p, &unused)) return 1;
  if (p.format != kFormatSelfIndex)
    return fail("only a compressed body can be searched: attribute format must be %d (selfindex)", kFormatSelfIndex);
  return 0;
}

int Kernel::compute(KernelContext* context) const {
  Tensor input[kInputs];
  for (size_t i = 0; i < kInputs; ++i)
    if (read_input(api, context, i, &input[i])) return 1;
  StepInputs in = {};
  if (view_queries(p, input, &in) || view_map(p, "query_map", input[kMap], p.q_heads, &in.query_map)) return 1;
  in.position = position_of(input);
  const Tensor& state = input[kState];
  if (check_state(p, state.data, state.size(), in.position)) return 1;
  const int64_t count = retrieved_slots(p, state.data);
  in.scored = count > 0 && p.latent == 0;  // the codes of what was just scanned are still in a cache; attention would fetch them once more
  const int64_t plain[3] = {p.kv_heads, in.rows, count}, scored[4] = {p.kv_heads, in.rows, 1 + p.q_heads / p.kv_heads, count};
  void* slots;
  if (make_output(api, context, 0, in.scored ? scored : plain, in.scored ? 4 : 3, &slots)) return 1;
  if (count == 0) return 0;
  SessionThreads threads(api, context);
  return retrieve_step(p, in, state.data, state.size(), static_cast<int32_t*>(slots), threads);
}

const CustomOp* make_op() {
  static CustomOp op = custom_op<Kernel>();
  op.get_input_count = [](const CustomOp*) -> size_t { return kInputs; };
  op.get_input_type = [](const CustomOp*, size_t i) { return i == kMap ? kUndefined : step_input_type(i); };
  op.get_input_presence = [](const CustomOp*, size_t i) { return step_input_presence(i); };
  op.get_output_count = [](const CustomOp*) -> size_t { return 1; };
  op.get_output_type = [](const CustomOp*, size_t) { return kInt32; };
  return &op;
}

}  // namespace

const CustomOp* sign_vq_retrieval() {
  static const CustomOp* op = make_op();
  return op;
}

}  // namespace edgekv::ort
