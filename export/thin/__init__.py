"""Thin keys: a cache that stores fewer numbers per key than a head has (docs/thin_keys.md)."""
