#include "cpu/keep_rules/keep_rule.h"

namespace edgekv {

KeepRule keep_rule(int32_t keep) {
  switch (keep) {
    case kKeepWindow: return keep_window;
    case kKeepHeavy: return keep_heavy;
    default: return keep_full;
  }
}

}  // namespace edgekv
