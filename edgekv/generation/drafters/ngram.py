"""Drafts by looking the end of the text up in the text itself (prompt look-up): no weights, no cache, no memory.

Good where the answer repeats the prompt: edits, summaries, quotations, code. The text is searched afresh each time, which takes
microseconds for thousands of tokens, so nothing grows with a conversation.
"""

from __future__ import annotations

from array import array

import numpy as np

from edgekv.generation.drafters import Draft, Length
from edgekv.generation.sampling import Sampler

LONGEST = 12  # tokens of the end that are compared; a longer match is not a better one
_SEARCHED = 1 << 17  # newest tokens that are searched
_NEAREST = 256  # most recent occurrences of the last token that are compared further


def look_up(text: np.ndarray, pending: int) -> tuple[int, int]:
    """Where the end of `text` [n] and `pending` occurred in the text before.

    Returns the index behind the best earlier occurrence and the number of tokens that match, or (n + 1, 0). The longest match
    wins, up to LONGEST tokens, then the most recent one.
    """
    n = text.size
    ends = np.flatnonzero(text == pending)[-_NEAREST:]
    if ends.size == 0:
        return n + 1, 0
    length = 1
    while length < LONGEST and length <= n:
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == text[n - length]]
        if longer.size == 0:
            break
        ends, length = longer, length + 1
    return int(ends[-1]) + 1, length


class NgramDrafter:
    """Proposes what followed the longest earlier occurrence of the last tokens.

    Grades are the number of tokens that matched, counting drafted ones: the longer the match, the likelier the next token.
    """

    name = "ngram"
    grades = LONGEST
    arena_bytes = 0
    failure = None
    weight_bytes = 0
    steps = 0

    def prior(self, grade: int) -> float:
        return 0.3 + 0.05 * grade

    def follow(self, tokens: array, anew: bool = False) -> None:
        pass

    def draft(self, tokens: array, pending: int, length: Length, sampler: Sampler) -> Draft:
        text = np.frombuffer(tokens, np.int32)[-_SEARCHED:]
        source, matched = look_up(text, pending)
        drafted: list[int] = []
        grades: list[int] = []
        while matched and length.wants_law():
            grade = min(matched + len(drafted), LONGEST) - 1
            if not length.wants_token(grade):
                break
            if source < text.size:
                drafted.append(int(text[source]))
            else:  # the match reaches the end of the text and goes on into what follows it: the text repeats itself
                drafted.append(pending if source == text.size else drafted[source - text.size - 1])
            grades.append(grade)
            source += 1
        return Draft(drafted, [None] * len(drafted), grades)

    def close(self) -> None:
        pass
