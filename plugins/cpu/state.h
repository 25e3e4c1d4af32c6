// A layer's state as memory: making one, checking one that a caller hands in, and hashing what is committed.
#pragma once
#include <cstddef>
#include <cstdint>

#include "layout/state_layout.h"

namespace edgekv {

// Typed access to one state. Planes of elements stay bytes; which element they hold is a parameter.
struct StateView {
  StateHeader* header;
  int32_t* body_pos;
  float* body_score;
  float* body_seen;
  uint8_t *body_k, *body_v, *body_z;
  uint8_t *index, *payload;
  uint16_t* mean;
  float *codebook, *code_seen;
  uint8_t *sink_k, *sink_v, *tail_k, *tail_v, *tail_z, *tail_q;
};

StateView view_state(const LayerParams& params, void* state);

// Sinks that have left the tail for the planes of their own, which a compressed body has.
inline int64_t sinks_moved(const LayerParams& params, int64_t tail_base) {
  return params.format != kFormatSelfIndex ? 0 : params.sinks < tail_base ? params.sinks : tail_base;
}

// Writes an empty cache: zeroed planes, positions -1. Returns 0, or 1 with a sentence (error.h).
int init_state(const LayerParams& params, void* state, int64_t bytes);

// Refuses (1 and a sentence) what no kernel may touch: bad parameters, wrong size or alignment, a block that is no state or
// belongs to other parameters, counts out of range, a position before the tail or beyond it. Never reads outside `bytes`.
int check_state(const LayerParams& params, const void* state, int64_t bytes, int64_t position);

// A 64-bit hash of everything committed: header without what the runtime sets and the traffic, body planes, tail slots and tail queries before `position`.
// The state must have passed check_state.
uint64_t hash_state(const LayerParams& params, const void* state, int64_t position);

}  // namespace edgekv
