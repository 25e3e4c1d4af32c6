"""Four named numbers, one of them asked for: the others are there to mislead (RULER, multi-key needles)."""

import numpy as np

from edgekv.quality.tasks.puzzle import Puzzle, numbers, words

KEYS = 4


def make(rng: np.random.Generator) -> Puzzle:
    names, codes = words(rng, KEYS), numbers(rng, KEYS)
    target = int(rng.integers(KEYS))
    name, code = names[target], codes[target]
    facts = tuple(f"The secret code for {n} is {c}. Remember it." for n, c in zip(names, codes, strict=True))
    return Puzzle(facts, target, f"What is the secret code for {name}?", (code,), f"The secret code for {name} is")
