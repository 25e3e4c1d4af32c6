"""Keep rules: which of the body's and the tail's tokens form the next body. One file per rule; RULES is the registry.

A rule is a function choose(params, ranking) -> kept, called only with committed tokens:
  params   fields of attributes.def
  ranking  float32 [kv_heads, n]: n candidates in order of position, higher means more worth keeping
  kept     int64 [kv_heads, m]: indices of the tokens that stay, ascending, m <= body_slots the same for all heads
While everything fits, everything is kept: rules see only candidates that do not all fit.
"""

from edgekv.layout import KEEPS
from edgekv.reference.keep import full, heavy, window

RULES = {
    KEEPS["full"]: full.choose,
    KEEPS["window"]: window.choose,
    KEEPS["heavy"]: heavy.choose,
}
