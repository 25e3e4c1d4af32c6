// edgekv::BoundedCacheAttention for ONNX Runtime.
//
// inputs   0 q float32 [1, q_heads, T, key_dim] or [1, T, q_heads * key_dim]; 1 k and 2 v likewise with kv_heads, each in its own
//          order. Without k and v, q holds all three: [1, T, q_heads * key_dim + kv_heads * (key_dim + value_dim)]. With attribute
//          head_dim read head_dim for key_dim.
//          3 position int64 [1]; 4 state int8 [bytes]; with fused_rotary 5 cos and 6 sin float32 [1, T, rotary_dim/2 or rotary_dim,
//          or with 2 kv_heads * rotary_dim/2]
//          7 slots int32 [kv_heads, T, k] or with scores, what each row attends to of a compressed body (sign_vq_retrieval.cpp); absent or
//          empty: all, or with attribute latent what the op finds itself, as its state's header says
//          8 query_map and 9 key_map [q_heads or kv_heads, head_dim, key_dim] of the cache's element type, float16 or float32, with
//          attribute head_dim, else absent
//          10 key_encode float32 [kv_heads * key_dim, latent] and 11 key_decode [kv_heads, latent + 1, key_dim], the last row of a head its
//          mean key, with attribute latent, else absent
// outputs  0 y float32 [1, T, q_heads * value_dim]; 1 state, which must be the same memory as input 4
// attributes: the fields of layout/attributes.def, inv_freq (floats; steps need it with latent), plugin_namespace and plugin_version (for TensorRT, unused here)
#include "ort/bounded_cache_attention.h"

#include <cinttypes>
#include <memory>
#include <vector>

#include "cpu/attention.h"
#include "cpu/error.h"
#include "cpu/latent_levels.h"
#include "cpu/scratch.h"
#include "cpu/state.h"
#include "ort/custom_op.h"
#include "ort/session_threads.h"
#include "ort/step_inputs.h"

namespace edgekv::ort {
namespace {

struct Kernel {
  static constexpr const char* kName = "BoundedCacheAttention";
  const Api* api;
  LayerParams p;
  std::vector<float> inv_freq;
  std::unique_ptr<DecoderLevels> levels;  // of a constant key_decode, with quantised latents
  int create(const KernelInfo* info);
  int compute(KernelContext* context) const;
};

int Kernel::create(const KernelInfo* info) {
  if (read_params(api, info, &p, &inv_freq)) return 1;
  Tensor decode;
  StepInputs unused = {};
  if (!packs_latents(p) || read_constant(api, info, kKeyDecode, &decode) || view_decode(p, decode, &unused)) return 0;  // steps make them, or complain
  levels = std::make_unique<DecoderLevels>(p, unused.key_decode);
  return levels->view.numbers != nullptr ? 0 : fail("out of memory: there is none left for the decoder of latent keys");
}

int Kernel::compute(KernelContext* context) const {
  Tensor input[kAttentionInputs];
  for (size_t i = 0; i < kAttentionInputs; ++i)
    if (read_input(api, context, i, &input[i])) return 1;

  StepInputs in = {};
  if (view_step(p, input, &in)) return 1;
  in.position = position_of(input);
  if (view_map(p, "query_map", input[kQueryMap], p.q_heads, &in.query_map) || view_map(p, "key_map", input[kKeyMap], p.kv_heads, &in.key_map))
    return 1;
  if (view_latent(p, input[kKeyEncode], input[kKeyDecode], &in)) return 1;
  in.inv_freq = inv_freq.empty() ? nullptr : inv_freq.data();
  in.levels = levels ? &levels->view : nullptr;
  if (const Tensor& slots = input[kSlots]; slots.data != nullptr) {
    in.scored = slots.rank == 4 && slots.dims[2] == 1 + p.q_heads / p.kv_heads;
    if ((slots.rank != 3 && !in.scored) || slots.dims[0] != p.kv_heads || slots.dims[1] != in.rows)
      return fail("slots must have the shape [%d, %" PRId64 ", k] or [%d, %" PRId64 ", %d, k]", p.kv_heads, in.rows, p.kv_heads, in.rows,
                  1 + p.q_heads / p.kv_heads);
    in.slots = static_cast<const int32_t*>(slots.data);
    in.chosen = slots.dims[slots.rank - 1];
  }

  const Tensor& state = input[kState];
  void* y;
  if (make_step_outputs(api, context, p, state, in.rows, &y)) return 1;
  SessionThreads threads(api, context);
  Scratch found;
  if (packs_latents(p) && in.slots == nullptr) {  // no scores are handed over, so a node of its own would only cost its call
    if (check_state(p, state.data, state.size(), in.position)) return 1;
    in.chosen = retrieved_slots(p, state.data);
    if (in.chosen > 0) {
      int32_t* slots = static_cast<int32_t*>(found.reserve(size_t(p.kv_heads * in.rows * in.chosen) * sizeof(int32_t)));
      if (slots == nullptr) return fail("out of memory: there is none left for what a compressed body is searched for");
      if (retrieve_step(p, in, state.data, state.size(), slots, threads)) return 1;
      in.slots = slots;
    }
  }
  return attend_step(p, in, state.data, state.size(), static_cast<float*>(y), threads);
}

const CustomOp* make_op() {
  static CustomOp op = custom_op<Kernel>();
  declare_attention(&op);
  return &op;
}

}  // namespace

const CustomOp* bounded_cache_attention() {
  static const CustomOp* op = make_op();
  return op;
}

}  // namespace edgekv::ort
