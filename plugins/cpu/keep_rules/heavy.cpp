// Attention sinks, the newest `window` tokens and, of the others, those that received most attention (H2O, arXiv 2306.14048).
#include <algorithm>

#include "cpu/keep_rules/keep_rule.h"

namespace edgekv {

int keep_heavy(const LayerParams& params, int candidates, const float* ranking, int32_t* kept, int32_t* work) {
  const int first = params.sinks, last = candidates - params.window, best = params.body_slots - params.sinks - params.window;
  for (int i = first; i < last; ++i) work[i - first] = i;
  // NaN, which only a damaged state holds, ranks last: a comparison that is no ordering would send the sort out of bounds.
  auto value = [&](int32_t i) { return ranking[i] == ranking[i] ? ranking[i] : -__builtin_inff(); };
  auto before = [&](int32_t a, int32_t b) { return value(a) != value(b) ? value(a) > value(b) : a < b; };
  std::nth_element(work, work + best, work + (last - first), before);
  std::sort(work, work + best);
  for (int i = 0; i < params.sinks; ++i) kept[i] = i;
  std::copy(work, work + best, kept + params.sinks);
  for (int i = 0; i < params.window; ++i) kept[params.sinks + best + i] = last + i;
  return 0;
}

}  // namespace edgekv
