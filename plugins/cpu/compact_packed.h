// Compaction of a compressed body (format = selfindex).
#pragma once
#include "cpu/parallel.h"
#include "cpu/state.h"

namespace edgekv {

// As compact_state, which calls it with a state that it has checked.
int compact_packed(const LayerParams& params, void* state, int64_t position, int64_t rank_base, Parallel& parallel);

}  // namespace edgekv
