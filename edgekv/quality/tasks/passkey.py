"""One number hidden in the text (passkey retrieval, arXiv 2305.16300)."""

import numpy as np

from edgekv.quality.tasks.puzzle import Puzzle, numbers


def make(rng: np.random.Generator) -> Puzzle:
    [code] = numbers(rng, 1)
    return Puzzle((f"The secret code is {code}. Remember it. {code} is the secret code.",), 0, "What is the secret code?", (code,), "The secret code is")
