"""Shared by all tests. Pytest puts this folder on the path, so tests may import the helpers beside this file."""

from hypothesis import settings

# Slow machines must not turn a passing property into a failure; examples are the same on every run.
settings.register_profile("edgekv", deadline=None, derandomize=True)
settings.load_profile("edgekv")
