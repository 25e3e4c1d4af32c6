"""A cache of compressed keys that are their own index, in NumPy. docs/self_index.md gives the formulas and says why these.

edgekv/layout.py places the bytes, index_plane.py the codes in them, transform.py spreads a head's energy over its numbers, quantise.py packs magnitudes and values,
signs.py holds the 4-bit sign codes with their codebook and table scores, cache.py the step and the compaction; latents.py quantises latent keys, of which
latent_cache.py has a cache.
"""

from edgekv.reference.self_index.cache import SelfIndexCache
from edgekv.reference.self_index.latent_cache import LatentIndexCache

__all__ = ["LatentIndexCache", "SelfIndexCache"]
