"""A chain of assignments, spread over the text: which variables hold the number? (RULER, variable tracking)"""

import numpy as np

from edgekv.quality.tasks.puzzle import Puzzle, numbers

HOPS = 3
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def make(rng: np.random.Generator) -> Puzzle:
    names = ["".join(LETTERS[i] for i in rng.choice(len(LETTERS), 3, replace=False)) for _ in range(HOPS)]
    while len(set(names)) < HOPS:
        names = ["".join(LETTERS[i] for i in rng.choice(len(LETTERS), 3, replace=False)) for _ in range(HOPS)]
    [number] = numbers(rng, 1)
    facts = (f"VAR {names[0]} = {number}.", *(f"VAR {b} = VAR {a}." for a, b in zip(names, names[1:], strict=False)))
    question = f"Which variables are assigned the value {number}, directly or through another variable? There are {HOPS} of them."
    return Puzzle(facts, None, question, tuple(names), f"The variables with the value {number} are")
