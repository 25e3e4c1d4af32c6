// The functions that edgekv/native.py calls through ctypes. All return 0 (or a result) on success; on failure nonzero (or -1),
// with a sentence in edgekv_last_error().
#include <atomic>
#include <cstdint>
#include <cstring>

#include "cpu/attention.h"
#include "cpu/compaction.h"
#include "cpu/dispatch.h"
#include "cpu/error.h"
#include "cpu/schema.h"
#include "cpu/state.h"

#define EDGEKV_API extern "C" __attribute__((visibility("default")))

using namespace edgekv;

EDGEKV_API const char* edgekv_schema() { return schema_json(); }
EDGEKV_API const char* edgekv_last_error() { return error_text(); }
EDGEKV_API const char* edgekv_isa() { return kernels().name; }
EDGEKV_API int edgekv_set_isa(const char* name) { return set_isa(name); }

EDGEKV_API const char* edgekv_check(const LayerParams* params) { return check_params(*params); }

EDGEKV_API int64_t edgekv_state_bytes(const LayerParams* params) {
  if (const char* sentence = check_params(*params)) return fail("%s", sentence), -1;
  return int64_t(state_layout(*params).bytes);
}

EDGEKV_API int edgekv_layout(const LayerParams* params, int64_t offsets[18]) {
  if (const char* sentence = check_params(*params)) return fail("%s", sentence);
  const StateLayout at = state_layout(*params);
  const size_t all[18] = {at.body_pos, at.body_score, at.body_seen, at.body_k, at.body_v, at.body_z, at.index,  at.payload, at.mean,
                          at.codebook, at.code_seen,  at.sink_k,    at.sink_v, at.tail_k, at.tail_v, at.tail_z, at.tail_q, at.bytes};
  for (int i = 0; i < 18; ++i) offsets[i] = int64_t(all[i]);
  return 0;
}

EDGEKV_API uint64_t edgekv_params_hash(const LayerParams* params) { return params_hash(*params); }

EDGEKV_API int edgekv_state_init(const LayerParams* params, void* state, int64_t bytes) { return init_state(*params, state, bytes); }

// 0 with a sentence when the state is refused.
EDGEKV_API uint64_t edgekv_state_hash(const LayerParams* params, const void* state, int64_t bytes, int64_t position) {
  if (check_state(*params, state, bytes, position)) return 0;
  const uint64_t hash = hash_state(*params, state, position);
  return hash == 0 ? 1 : hash;
}

// q [rows][q_heads][given], k [rows][kv_heads][given], v [rows][kv_heads][value_dim], y [rows][q_heads][value_dim], given = head_dim or
// key_dim; cos and sin [rows][table_columns] with fused_rotary, else null; query_map and key_map [heads][head_dim][key_dim] of
// params->element with head_dim, else null; key_encode [kv_heads key_dim][latent], key_decode [kv_heads][latent + 1][key_dim] and inv_freq [rotary_dim / 2] with
// latent, else null; slots [kv_heads][rows][chosen] or null, with `scored` [kv_heads][rows][1 + group][chosen], the scores as float32.
EDGEKV_API int edgekv_attend(const LayerParams* params, const float* q, const float* k, const float* v, int64_t rows, int64_t position,
                             const float* cos, const float* sin, int64_t table_columns, const void* query_map, const void* key_map,
                             const float* key_encode, const float* key_decode, const float* inv_freq, void* state, int64_t bytes, const int32_t* slots, int64_t chosen, int scored, float* y, int threads) {
  const LayerParams& p = *params;
  auto view = [](const float* data, int64_t heads, int64_t dim) { return Rows{data, dim, heads * dim}; };
  const StepInputs in = {view(q, p.q_heads, given_dim(p)), view(k, p.kv_heads, given_dim(p)), view(v, p.kv_heads, p.value_dim), rows, position,
                         cos, sin, table_columns, slots, chosen, scored != 0, query_map, key_map, key_encode, key_decode, inv_freq, nullptr};
  Threads own(threads);
  return attend_step(p, in, state, bytes, y, own);
}

// Slots per row that the next function writes, or -1.
EDGEKV_API int64_t edgekv_retrieved_slots(const LayerParams* params, const void* state, int64_t bytes, int64_t position) {
  if (check_state(*params, state, bytes, position)) return -1;
  return retrieved_slots(*params, state);
}

// slots [kv_heads][rows][edgekv_retrieved_slots], or with `scored` as above; the rest as above.
EDGEKV_API int edgekv_retrieve(const LayerParams* params, const float* q, int64_t rows, int64_t position, const float* cos, const float* sin,
                               int64_t table_columns, const void* query_map, void* state, int64_t bytes, int32_t* slots, int scored, int threads) {
  const LayerParams& p = *params;
  StepInputs in = {};
  in.q = {q, given_dim(p), int64_t(p.q_heads) * given_dim(p)};
  in.query_map = query_map;
  in.rows = rows, in.position = position;
  in.cos = cos, in.sin = sin, in.table_columns = table_columns;
  in.scored = scored != 0;
  Threads own(threads);
  return retrieve_step(p, in, state, bytes, slots, own);
}

// inv_freq [rotary_dim / 2] or null. Returns 2 when a cache that keeps everything is full.
EDGEKV_API int edgekv_compact(const LayerParams* params, const float* inv_freq, void* state, int64_t bytes, int64_t position,
                              int64_t rank_base, int threads) {
  Threads own(threads);
  return compact_state(*params, inv_freq, state, bytes, position, rank_base, own);
}

// The same for `count` layers that reached one boundary, spread over the threads. Every layer is tried; the result and the sentence
// are those of the first that failed.
EDGEKV_API int edgekv_compact_layers(int64_t count, const LayerParams* const* params, const float* const* inv_freq, void* const* states,
                                     const int64_t* bytes, int64_t position, int64_t rank_base, int threads) {
  std::atomic<int> result{0};
  char sentence[512] = "";
  Threads(threads).each(size_t(count), [&](size_t i) {
    Inline alone;
    const int failed = compact_state(*params[i], inv_freq[i], states[i], bytes[i], position, rank_base, alone);
    int none = 0;
    if (failed && result.compare_exchange_strong(none, failed)) std::memcpy(sentence, error_text(), sizeof(sentence));
  });
  if (result) fail("%s", sentence);
  return result;
}
