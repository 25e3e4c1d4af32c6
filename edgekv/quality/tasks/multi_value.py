"""Three numbers under one name, all asked for (RULER, multi-value needles)."""

import numpy as np

from edgekv.quality.tasks.puzzle import Puzzle, numbers, words

VALUES = 3


def make(rng: np.random.Generator) -> Puzzle:
    [name], codes = words(rng, 1), numbers(rng, VALUES)
    facts = tuple(f"One of the secret codes for {name} is {code}. Remember it." for code in codes)
    question = f"What are all the secret codes for {name}? There are {VALUES} of them."
    return Puzzle(facts, None, question, tuple(codes), f"The secret codes for {name} are")
