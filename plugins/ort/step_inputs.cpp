#include "ort/step_inputs.h"

#include <cinttypes>

#include "cpu/error.h"

namespace edgekv::ort {
namespace {

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

int64_t packed_width(const LayerParams& p) {
  return int64_t(p.q_heads) * given_dim(p) + int64_t(p.kv_heads) * (given_dim(p) + p.value_dim);
}

int view_packed(const LayerParams& p, const Tensor& x, StepInputs* in) {
  const int64_t dim = given_dim(p), keys_at = p.q_heads * dim, values_at = keys_at + p.kv_heads * dim, width = packed_width(p);
  if (x.rank != 3 || x.dims[0] != 1 || x.dims[2] != width)
    return fail("without k and v, q must hold queries, keys and values: [1, T, %" PRId64 "]", width);
  const float* data = static_cast<const float*>(x.data);
  in->rows = x.dims[1];
  in->q = {data, dim, width};
  in->k = {data + keys_at, dim, width};
  in->v = {data + values_at, p.value_dim, width};
  return 0;
}

int view_tables(const Tensor& cos, const Tensor& sin, StepInputs* in) {
  for (const Tensor* x : {&cos, &sin})
    if (x->data == nullptr || x->rank != 3 || x->dims[0] != 1 || x->dims[1] != in->rows || x->dims[2] != cos.dims[2])
      return fail("fused_rotary needs cos and sin of the shape [1, %" PRId64 ", columns]", in->rows);
  in->cos = static_cast<const float*>(cos.data);
  in->sin = static_cast<const float*>(sin.data);
  in->table_columns = cos.dims[2];
  return 0;
}

int view_rest(const LayerParams& p, const Tensor* input, StepInputs* in) {
  if (p.fused_rotary && view_tables(input[kCos], input[kSin], in)) return 1;
  if (input[kPosition].data == nullptr || input[kPosition].size() != 1) return fail("position must hold one number");
  return 0;
}

}  // namespace

int view_map(const LayerParams& p, const char* name, const Tensor& x, int64_t heads, const void** map) {
  *map = x.data;
  if (p.head_dim == 0) return x.data == nullptr ? 0 : fail("%s is for thin keys: attribute head_dim must say how many numbers a head has", name);
  if (x.data == nullptr || x.rank != 3 || x.dims[0] != heads || x.dims[1] != p.head_dim || x.dims[2] != p.key_dim)
    return fail("%s must have the shape [%" PRId64 ", %d, %d]", name, heads, p.head_dim, p.key_dim);
  if (x.type != (p.element == kFloat16 ? kHalf : kFloat))
    return fail("%s must hold %s numbers, as the cache does; export the model again", name, p.element == kFloat16 ? "float16" : "float32");
  return 0;
}

int view_decode(const LayerParams& p, const Tensor& decode, StepInputs* in) {
  in->key_decode = static_cast<const float*>(decode.data);
  if (decode.data == nullptr || decode.rank != 3 || decode.dims[0] != p.kv_heads || decode.dims[1] != p.latent + 1 || decode.dims[2] != p.key_dim)
    return fail("key_decode must have the shape [%d, %d, %d]", p.kv_heads, p.latent + 1, p.key_dim);
  return 0;
}

int view_latent(const LayerParams& p, const Tensor& encode, const Tensor& decode, StepInputs* in) {
  in->key_encode = static_cast<const float*>(encode.data);
  if (p.latent == 0)
    return encode.data == nullptr && decode.data == nullptr ? 0 : fail("key_encode and key_decode are for latent keys: attribute latent must say how many numbers they have");
  const int64_t all = int64_t(p.kv_heads) * p.key_dim;
  if (encode.data == nullptr || encode.rank != 2 || encode.dims[0] != all || encode.dims[1] != p.latent)
    return fail("key_encode must have the shape [%" PRId64 ", %d]", all, p.latent);
  return view_decode(p, decode, in);
}

int view_step(const LayerParams& p, const Tensor* input, StepInputs* in) {
  in->rows = -1;
  if (input[kQ].data == nullptr) return fail("q has no rows");
  if (input[kK].data == nullptr && input[kV].data == nullptr) {
    if (view_packed(p, input[kQ], in)) return 1;
  } else if (view_rows("q", input[kQ], p.q_heads, given_dim(p), &in->q, &in->rows) ||
             view_rows("k", input[kK], p.kv_heads, given_dim(p), &in->k, &in->rows) ||
             view_rows("v", input[kV], p.kv_heads, p.value_dim, &in->v, &in->rows)) {
    return 1;
  }
  return view_rest(p, input, in);
}

int view_queries(const LayerParams& p, const Tensor* input, StepInputs* in) {
  const Tensor& q = input[kQ];
  in->rows = -1;
  if (q.data == nullptr) return fail("q has no rows");
  if (q.rank == 3 && q.dims[2] == packed_width(p) ? view_packed(p, q, in) : view_rows("q", q, p.q_heads, given_dim(p), &in->q, &in->rows))
    return 1;
  return view_rest(p, input, in);
}

void declare_attention(CustomOp* op) {
  op->get_input_count = [](const CustomOp*) -> size_t { return kAttentionInputs; };
  op->get_input_type = [](const CustomOp*, size_t i) { return i == kSlots ? kInt32 : i == kQueryMap || i == kKeyMap ? kUndefined : step_input_type(i); };
  op->get_input_presence = [](const CustomOp*, size_t i) { return step_input_presence(i); };
  op->get_output_count = [](const CustomOp*) -> size_t { return 2; };
  op->get_output_type = [](const CustomOp*, size_t i) { return i == 0 ? kFloat : kInt8; };
  op->get_alias_map = [](int** inputs, int** outputs) -> size_t {
    static int from = kState, to = 1;
    *inputs = &from;
    *outputs = &to;
    return 1;
  };
}

int make_step_outputs(const Api* api, KernelContext* context, const LayerParams& p, const Tensor& state, int64_t rows, void** y) {
  const int64_t shape[3] = {1, rows, int64_t(p.q_heads) * p.value_dim};
  void* same;
  if (make_output(api, context, 1, state.dims, state.rank, &same)) return 1;
  if (state.data == nullptr || same != state.data)
    return fail("the state must be updated in place: bind the state input and the state output of layer %d to one buffer", p.layer);
  return make_output(api, context, 0, shape, 3, y);
}

}  // namespace edgekv::ort
