"""How tokens are produced once the prompt is committed. One generator per way; all share one contract.

A decoder yields tokens one by one. When it yields a token, that token is sampled but need not be committed; the text that is
committed is always a beginning of prompt + yielded tokens, or reaches past it by tokens that would be yielded next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from edgekv.generation.sampling import Sampler
from edgekv.generation.session import Session

_FIRST_ROW = np.zeros(1, np.int64)


class Decoder(Protocol):
    def __call__(self, session: Session, sampler: Sampler, logits: np.ndarray, most: int | None = None) -> Iterator[int]:
        """Yields tokens after the committed text; `logits` float32 [vocab] belong to its last token.

        Ends by itself only when the cache is full. `most` tokens will be asked for at most (None: any number), so that nothing needs to be
        computed for later ones.
        """
        ...


def plain(session: Session, sampler: Sampler, logits: np.ndarray, most: int | None = None) -> Iterator[int]:
    """One token per step."""
    block = np.empty(1, np.int64)
    while True:
        token = sampler.sample(logits)
        yield token
        if session.room < 1:
            return
        block[0] = token
        logits = session.step(block, _FIRST_ROW)[0]
        session.commit(1)
