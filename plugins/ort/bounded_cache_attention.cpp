// edgekv::BoundedCacheAttention for ONNX Runtime.
//
// inputs   0 q float32 [1, q_heads, T, key_dim] or [1, T, q_heads * key_dim]; 1 k and 2 v likewise with kv_heads, each in its own
//          order. Without k and v, q holds all three: [1, T, q_heads * key_dim + kv_heads * (key_dim + value_dim)].
//          3 position int64 [1]; 4 state int8 [bytes]; with fused_rotary 5 cos and 6 sin float32 [1, T, rotary_dim/2 or rotary_dim]
// outputs  0 y float32 [1, T, q_heads * value_dim]; 1 state, which must be the same memory as input 4
// attributes: the fields of layout/attributes.def, inv_freq (floats), plugin_namespace and plugin_version (for TensorRT, unused here)
#include "ort/bounded_cache_attention.h"

#include <cinttypes>
#include <memory>
#include <new>
#include <vector>

#include "cpu/attention.h"
#include "cpu/error.h"
#include "ort/kernel_io.h"
#include "ort/session_threads.h"

namespace edgekv::ort {
namespace {

enum Input : size_t { kQ, kK, kV, kPosition, kState, kCos, kSin, kInputs };

struct Kernel {
  const Api* api;
  LayerParams params;
  std::vector<float> inv_freq;
};

Status* refusal(const Api* api) {
  char text[600];
  snprintf(text, sizeof(text), "BoundedCacheAttention: %s", error_text());
  return function<CreateStatus>(api)(kInvalidArgument, text);
}

// Where head h, row t of an activation is; *rows is set by the first call and compared by later ones.
int view_rows(const char* name, const Tensor& x, int64_t heads, int64_t dim, Rows* view, int64_t* rows) {
  int64_t found;
  if (x.rank == 4 && x.dims[0] == 1 && x.dims[1] == heads && x.dims[3] == dim) {
    found = x.dims[2];
    *view = {static_cast<const float*>(x.data), found * dim, dim};
  } else if (x.rank == 3 && x.dims[0] == 1 && x.dims[2] == heads * dim) {
    found = x.dims[1];
    *view = {static_cast<const float*>(x.data), dim, heads * dim};
  } else {
    return fail("%s must have the shape [1, %" PRId64 ", T, %" PRId64 "] or [1, T, %" PRId64 "]", name, heads, dim, heads * dim);
  }
  if (*rows >= 0 && *rows != found) return fail("%s has %" PRId64 " rows but q has %" PRId64, name, found, *rows);
  *rows = found;
  return 0;
}

int view_packed(const LayerParams& p, const Tensor& x, StepInputs* in) {
  const int64_t keys_at = int64_t(p.q_heads) * p.key_dim, values_at = keys_at + int64_t(p.kv_heads) * p.key_dim;
  const int64_t width = values_at + int64_t(p.kv_heads) * p.value_dim;
  if (x.rank != 3 || x.dims[0] != 1 || x.dims[2] != width)
    return fail("without k and v, q must hold queries, keys and values: [1, T, %" PRId64 "]", width);
  const float* data = static_cast<const float*>(x.data);
  in->rows = x.dims[1];
  in->q = {data, p.key_dim, width};
  in->k = {data + keys_at, p.key_dim, width};
  in->v = {data + values_at, p.value_dim, width};
  return 0;
}

int view_tables(const Tensor& cos, const Tensor& sin, StepInputs* in) {
  for (const Tensor* x : {&cos, &sin})
    if (x->data == nullptr || x->rank != 3 || x->dims[0] != 1 || x->dims[1] != in->rows || x->dims[2] != cos.dims[2])
      return fail("fused_rotary needs cos and sin of the shape [1, %" PRId64 ", rotary_dim / 2 or rotary_dim]", in->rows);
  in->cos = static_cast<const float*>(cos.data);
  in->sin = static_cast<const float*>(sin.data);
  in->table_columns = cos.dims[2];
  return 0;
}

int compute(const Kernel& kernel, KernelContext* context) {
  const LayerParams& p = kernel.params;
  Tensor input[kInputs];
  for (size_t i = 0; i < kInputs; ++i)
    if (read_input(kernel.api, context, i, &input[i])) return 1;

  StepInputs in = {};
  in.rows = -1;
  if (input[kQ].data == nullptr) return fail("q has no rows");
  if (input[kK].data == nullptr && input[kV].data == nullptr) {
    if (view_packed(p, input[kQ], &in)) return 1;
  } else if (view_rows("q", input[kQ], p.q_heads, p.key_dim, &in.q, &in.rows) ||
             view_rows("k", input[kK], p.kv_heads, p.key_dim, &in.k, &in.rows) ||
             view_rows("v", input[kV], p.kv_heads, p.value_dim, &in.v, &in.rows)) {
    return 1;
  }
  if (p.fused_rotary && view_tables(input[kCos], input[kSin], &in)) return 1;
  if (input[kPosition].data == nullptr || input[kPosition].size() != 1) return fail("position must hold one number");
  in.position = *static_cast<const int64_t*>(input[kPosition].data);

  const Tensor& state = input[kState];
  void *y, *same;
  const int64_t shape[3] = {1, in.rows, int64_t(p.q_heads) * p.value_dim};
  if (make_output(kernel.api, context, 1, state.dims, state.rank, &same)) return 1;
  if (state.data == nullptr || same != state.data)
    return fail("the state must be updated in place: bind the state input and the state output of layer %d to one buffer", p.layer);
  if (make_output(kernel.api, context, 0, shape, 3, &y)) return 1;
  SessionThreads threads(kernel.api, context);
  return attend_step(p, in, state.data, state.size(), static_cast<float*>(y), threads);
}

Status* create_kernel(const CustomOp*, const Api* api, const KernelInfo* info, void** made) try {
  auto kernel = std::make_unique<Kernel>(Kernel{api, {}, {}});
  if (read_params(api, info, &kernel->params, &kernel->inv_freq)) return refusal(api);
  *made = kernel.release();
  return nullptr;
} catch (const std::bad_alloc&) {
  return function<CreateStatus>(api)(kFail, "BoundedCacheAttention: out of memory");
}

Status* compute_kernel(void* made, KernelContext* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(made);
  try {
    return compute(kernel, context) == 0 ? nullptr : refusal(kernel.api);
  } catch (const std::bad_alloc&) {
    return function<CreateStatus>(kernel.api)(kFail, "BoundedCacheAttention: out of memory");
  }
}

const CustomOp* make_op() {
  static CustomOp op = {};
  op.version = kApiVersion;
  op.get_name = [](const CustomOp*) { return "BoundedCacheAttention"; };
  op.get_execution_provider = [](const CustomOp*) -> const char* { return "CPUExecutionProvider"; };
  op.get_input_count = [](const CustomOp*) -> size_t { return kInputs; };
  op.get_input_type = [](const CustomOp*, size_t i) { return i == kPosition ? kInt64 : i == kState ? kInt8 : kFloat; };
  op.get_input_presence = [](const CustomOp*, size_t i) { return i == kQ || i == kPosition || i == kState ? kRequired : kOptional; };
  op.get_input_memory = [](const CustomOp*, size_t) { return kMemoryDefault; };
  op.get_output_count = [](const CustomOp*) -> size_t { return 2; };
  op.get_output_type = [](const CustomOp*, size_t i) { return i == 0 ? kFloat : kInt8; };
  op.get_output_presence = [](const CustomOp*, size_t) { return kRequired; };
  op.create_kernel_v2 = create_kernel;
  op.kernel_compute_v2 = compute_kernel;
  op.kernel_destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.get_start_version = [](const CustomOp*) { return 1; };
  op.get_end_version = [](const CustomOp*) { return 1; };
  op.get_alias_map = [](int** inputs, int** outputs) -> size_t {
    static int from = kState, to = 1;
    *inputs = &from;
    *outputs = &to;
    return 1;
  };
  op.release_alias_map = [](int*, int*) {};
  return &op;
}

}  // namespace

const CustomOp* bounded_cache_attention() {
  static const CustomOp* op = make_op();
  return op;
}

}  // namespace edgekv::ort
