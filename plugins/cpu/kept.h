// What is kept of the candidates of a second ranking. Included by keep_best_*.h.
#pragma once
#include <cstdint>

namespace {

struct Kept {
  const int32_t* candidates;  // their slots
  int32_t* slots;             // those of the kept ones
  const float* from;          // [heads][from_stride] scores of the candidates
  int64_t from_stride;
  float* to;                  // [heads][to_stride] of the kept ones
  int64_t to_stride;
  int heads;
};

}  // namespace
