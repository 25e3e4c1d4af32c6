"""The cache in NumPy, readable before fast: the oracle that every kernel is checked against.

cache.py holds one layer's cache (step, compaction, committed hash), attention.py the softmax rows, scores.py what heavy
hitters are chosen by, rotary.py the change of rotary positions, keep/ one file per keep rule. States have the layout of
edgekv.layout, byte for byte, so that a state written here can be read by the native library and the other way round.
"""

from edgekv.reference.cache import ReferenceCache

__all__ = ["ReferenceCache"]
