// Attention sinks and the newest tokens (StreamingLLM, arXiv 2309.17453). Sinks never leave, so they are the first candidates.
#include "cpu/keep_rules/keep_rule.h"

namespace edgekv {

int keep_window(const LayerParams& params, int candidates, const float*, int32_t* kept, int32_t*) {
  for (int i = 0; i < params.body_slots; ++i) kept[i] = i < params.sinks ? i : candidates - params.body_slots + i;
  return 0;
}

}  // namespace edgekv
