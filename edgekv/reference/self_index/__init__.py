"""A cache of compressed keys that are their own index, in NumPy. docs/self_index.md gives the formulas and says why these.

edgekv/layout.py places the bytes, index_plane.py the codes in them, transform.py spreads a head's energy over its numbers, quantise.py packs magnitudes and values,
signs.py holds the 4-bit sign codes with their codebook and table scores, cache.py the step and the compaction.
"""

from edgekv.reference.self_index.cache import SelfIndexCache

__all__ = ["SelfIndexCache"]
