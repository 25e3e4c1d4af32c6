// Choosing the slots of a compressed body that the rows of a step attend to: check, then one work item per row and kv head.
#include <algorithm>
#include <atomic>
#include <cinttypes>

#include "cpu/attention.h"
#include "cpu/dispatch.h"
#include "cpu/error.h"
#include "cpu/scratch.h"

namespace edgekv {

int64_t retrieved_slots(const LayerParams&, const void* state) {
  const StateHeader& h = *static_cast<const StateHeader*>(state);
  return std::min(h.retrieve, h.body_count);
}

int retrieve_step(const LayerParams& params, const StepInputs& in, void* state, int64_t bytes, int32_t* slots, Parallel& parallel) {
  if (check_state(params, state, bytes, in.position)) return 1;
  if (params.format != kFormatSelfIndex) return fail("only a compressed body can be searched: this cache is dense");
  const StateView view = view_state(params, state);
  const StateHeader& h = *view.header;
  if (check_rows(params, in, h)) return 1;
  if (h.hidden_from < h.hidden_to) return fail("a body with hidden slots cannot be searched: lower `retrieve` instead of hiding slots");

  if (in.scored && params.latent > 0) return fail("latent keys are not ranked again: slots of them have no scores");

  Loaded loaded = {};
  Retrieval r = {};
  r.params = params;
  r.state = view;
  r.group = params.q_heads / params.kv_heads;
  r.body_count = h.body_count;
  r.position = in.position;
  r.tail_base = h.tail_base;
  r.q = in.q;
  r.cos = params.fused_rotary ? in.cos : nullptr;
  r.sin = in.sin;
  r.table_stride = int(in.table_columns);
  r.query_map = params.head_dim > 0 ? in.query_map : nullptr;
  r.retrieve = int(retrieved_slots(params, state));
  r.candidates = params.latent > 0 ? 0 : h.candidates;  // there are no stored keys to rank again
  r.rows = int(in.rows);
  r.slots = slots;
  r.scored = in.scored;
  r.loaded = &loaded;
  if (r.retrieve == 0) return 0;

  const Kernels& kernel = kernels();
  const size_t work = size_t(RetrievalWork(r).bytes);
  std::atomic<bool> exhausted{false};
  parallel.each(size_t(params.kv_heads) * in.rows, [&](size_t item) {
    Scratch own;
    void* memory = own.reserve(work);
    if (memory == nullptr)
      exhausted = true;
    else
      kernel.retrieve(r, int(item % params.kv_heads), int(item / params.kv_heads), memory);
  });
  if (exhausted) return fail("out of memory: there is none left to search a compressed body");
  uint64_t* traffic = view.header->traffic;
  traffic[kReadBodyIndex] += loaded.body_index;
  traffic[kReadBodyKeys] += loaded.body_keys;
  traffic[kReadBodyMeta] += loaded.body_meta;
  return 0;
}

}  // namespace edgekv
