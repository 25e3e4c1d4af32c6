// Compaction of one layer: at a boundary the tail moves into the body, by the keep rule.
#pragma once
#include "cpu/parallel.h"
#include "layout/state_layout.h"

namespace edgekv {

// `position` is the boundary just reached: the whole tail is committed. rank_base is the rotary position of the next token:
// `position` itself unless positions = cache. inv_freq [rotary_dim / 2] may be null when no key has to be rotated.
// Returns 0; kCompactionFull when a cache that keeps everything has no room; otherwise 1. On failure there is a sentence (error.h)
// and nothing has changed.
constexpr int kCompactionFull = 2;
int compact_state(const LayerParams& params, const float* inv_freq, void* state, int64_t bytes, int64_t position, int64_t rank_base,
                  Parallel& parallel);

}  // namespace edgekv
