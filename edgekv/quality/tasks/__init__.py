"""Retrieval tasks in the style of RULER (arXiv 2404.06654), generated here. One file per task; TASKS is the registry.

A task is a function make(rng) -> Puzzle: facts to hide in a long text, a question about them, and the strings that a right
answer holds. Words and numbers come from the generator alone, so a seed makes the same puzzles everywhere.
"""

from edgekv.quality.tasks import multi_key, multi_value, passkey, variable_tracking
from edgekv.quality.tasks.puzzle import Puzzle

TASKS = {
    "passkey": passkey.make,
    "multi-key": multi_key.make,
    "multi-value": multi_value.make,
    "variable-tracking": variable_tracking.make,
}

__all__ = ["TASKS", "Puzzle"]
