// Keep everything: a text that no longer fits is an error, never a silent loss.
#include "cpu/error.h"
#include "cpu/keep_rules/keep_rule.h"

namespace edgekv {

int keep_full(const LayerParams& params, int candidates, const float*, int32_t*, int32_t*) {
  return fail("the cache keeps every token and is full: %d tokens do not fit %d slots", candidates, params.body_slots);
}

}  // namespace edgekv
