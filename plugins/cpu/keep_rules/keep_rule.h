// Keep rules: which of the body's and the tail's tokens form the next body. One file per rule, and one line in registry.cpp.
#pragma once
#include <cstdint>

#include "layout/state_layout.h"

namespace edgekv {

// Called when the candidates do not all fit. ranking [candidates] is in order of position, larger is more worth keeping; kept
// takes body_slots indices, ascending; work has room for `candidates` more. Returns 0, or 1 with a sentence (cpu/error.h).
using KeepRule = int (*)(const LayerParams& params, int candidates, const float* ranking, int32_t* kept, int32_t* work);

int keep_full(const LayerParams& params, int candidates, const float* ranking, int32_t* kept, int32_t* work);
int keep_window(const LayerParams& params, int candidates, const float* ranking, int32_t* kept, int32_t* work);
int keep_heavy(const LayerParams& params, int candidates, const float* ranking, int32_t* kept, int32_t* work);

// The rule of a value of `keep` that check_params accepted.
KeepRule keep_rule(int32_t keep);

}  // namespace edgekv
