"""Choosing the next token, exactly and without sorting the vocabulary.

Order of processing: repetition penalty, temperature, top-k, top-p, min-p; what remains is renormalised and drawn by inverting
the cumulative distribution. `distribution` gives the very law that `sample` draws from, so that speculative decoding
can apply one processing to target and draft.

Top-k takes a bound from block maxima and top-p from falling thresholds, so that only a few candidates are ever sorted. Ties
go to the lower token id everywhere, the argmax included.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgekv.errors import EdgekvError, UserError

_BLOCK = 64  # tokens per block maximum in top-k
_FIRST_CUT, _CUT_STEP = 2.0**-7, 2.0**-6  # thresholds of top-p, relative to the most probable token
_CERTAIN = np.ones(1)
_CERTAIN.flags.writeable = False


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen; the defaults are greedy decoding.

    temperature         divides the logits; 0 takes the most probable token
    top_k               keep the k most probable tokens; 0 keeps all
    top_p               keep the most probable tokens whose probabilities first sum to at least p; 1 keeps all
    min_p               keep tokens at least min_p times as probable as the most probable one; 0 keeps all
    repetition_penalty  divides positive and multiplies negative logits of tokens that occurred (CTRL, arXiv 1909.05858); 1 off
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature != 0.0 and not 0.01 <= self.temperature <= 100.0:
            raise UserError("--temperature must be 0 (greedy) or between 0.01 and 100.")
        if self.top_k < 0:
            raise UserError("--top-k must be 0 (off) or a number of tokens.")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError("--top-p must be above 0 and at most 1 (off).")
        if not 0.0 <= self.min_p <= 1.0:
            raise UserError("--min-p must be between 0 (off) and 1.")
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise UserError("--repetition-penalty must be above 0 and at most 100; 1 is off.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def top_k_ids(scores: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest scores, largest first, ties to the lower id. scores [V] -> int64 [min(k, V)]."""
    if k >= scores.size:
        return np.argsort(-scores, kind="stable")
    blocks = scores.size // _BLOCK
    if k < blocks:
        # the k-th largest block maximum has k scores at or above it, so it bounds the k-th largest score from below
        maxima = scores[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
        ids = np.flatnonzero(scores >= np.partition(maxima, blocks - k)[blocks - k])
    else:
        ids = np.flatnonzero(scores >= np.partition(scores, scores.size - k)[scores.size - k])
    return ids[np.argsort(-scores[ids], kind="stable")[:k]]


def nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Ids of the smallest set of largest weights that holds at least top_p of their sum, largest first. weights [V], max 1."""
    wanted = top_p * weights.sum(dtype=np.float64)
    cut = _FIRST_CUT
    while True:
        ids = np.flatnonzero(weights >= cut)
        if cut == 0.0 or weights[ids].sum(dtype=np.float64) >= wanted:
            break
        cut = cut * _CUT_STEP if cut > 1e-30 else 0.0
    ids = ids[np.argsort(-weights[ids], kind="stable")]
    count = int(np.searchsorted(np.cumsum(weights[ids], dtype=np.float64), wanted)) + 1
    return ids[:count]


def _first_above(total: np.ndarray, value: float) -> int:
    """Index of the first cumulative sum above `value`: never one of weight zero. Past the end (rounding), the last positive one."""
    index = int(np.searchsorted(total, value, side="right"))
    return index if index < total.size else int(np.searchsorted(total, total[-1]))


class Sampler:
    """Draws tokens with its own random stream.

    vocab  size of the logits it will see
    seed   of the stream; None takes one from the system, which `seed` then tells
    """

    def __init__(self, options: SamplingOptions, vocab: int, seed: int | None = None):
        self.options = options
        self.seed = secrets.randbits(63) if seed is None else seed
        self.rng = np.random.Generator(np.random.PCG64(self.seed))
        self._seen = np.zeros(vocab, bool)  # a mask, so that an endless conversation costs no memory
        self._scores = np.empty(vocab, np.float32)

    def observe(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Counts tokens as having occurred, for the repetition penalty."""
        if self.options.repetition_penalty != 1.0:
            self._seen[np.asarray(tokens, dtype=np.int64)] = True

    def forget(self) -> None:
        """No token has occurred."""
        self._seen[:] = False

    def _penalised(self, logits: np.ndarray, also: Sequence[int]) -> np.ndarray:
        penalty = self.options.repetition_penalty
        if penalty == 1.0:
            return logits
        seen = np.flatnonzero(self._seen)
        if len(also):
            seen = np.union1d(seen, np.asarray(also, dtype=np.int64))
        np.copyto(self._scores, logits)
        values = self._scores[seen]
        self._scores[seen] = np.where(values > 0, values / penalty, values * penalty)
        return self._scores

    def _weights(self, logits: np.ndarray, also: Sequence[int]) -> tuple[np.ndarray | None, np.ndarray]:
        """What can be drawn, not normalised: ids int64 [n] (None: all) and weights [n], float32 in memory this object may reuse or, of one
        certain token, _CERTAIN."""
        options = self.options
        scores = self._penalised(logits, also)
        best = int(scores.argmax())
        top = scores[best]
        if not math.isfinite(top):
            raise EdgekvError("the model produced logits that are not numbers")
        if options.greedy or options.top_k == 1:
            return np.array([best]), _CERTAIN
        factor = np.float32(1.0 / options.temperature)
        ids = None
        if options.top_k:
            ids = top_k_ids(scores, options.top_k)
            weights = np.exp((scores[ids] - top) * factor)
            if options.top_p < 1.0:  # already sorted: the nucleus is a prefix
                total = np.cumsum(weights, dtype=np.float64)
                count = int(np.searchsorted(total, options.top_p * total[-1])) + 1
                ids, weights = ids[:count], weights[:count]
        else:
            weights = np.subtract(scores, top, out=self._scores)
            weights *= factor
            np.exp(weights, out=weights)
            if options.top_p < 1.0:
                ids = nucleus(weights, options.top_p)
                weights = weights[ids]
        if options.min_p > 0.0:
            kept = np.flatnonzero(weights >= options.min_p)
            ids, weights = (kept if ids is None else ids[kept]), weights[kept]
        return ids, weights

    def candidates(self, logits: np.ndarray, also: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """What can be drawn: token ids int64 [n] and their probabilities float64 [n], summing to 1.

        logits  float32 [vocab], not changed
        also    tokens to count as having occurred beside the observed ones (drafted, not committed)

        Raises EdgekvError when the model produced no finite maximum.
        """
        ids, weights = self._weights(logits, also)
        if weights.size == 1:  # greedy decoding comes here with every token
            return np.zeros(1, np.int64) if ids is None else ids, _CERTAIN
        probabilities = weights.astype(np.float64)
        probabilities /= probabilities.sum()
        return np.arange(weights.size) if ids is None else ids, probabilities

    def distribution(self, logits: np.ndarray, also: Sequence[int] = ()) -> np.ndarray:
        """The same law over the whole vocabulary: float64 [vocab], zero for what cannot be drawn."""
        ids, probabilities = self.candidates(logits, also)
        dense = np.zeros(logits.shape[-1])
        dense[ids] = probabilities
        return dense

    def draw(self, weights: np.ndarray) -> int:
        """An index into weights [n] (not necessarily normalised) with probability proportional to them; one random number."""
        uniform, start = self.rng.random(), 0
        if weights.size > _BLOCK**2:  # find the block first, then look inside: the same law without summing everything in order
            whole = weights.size // _BLOCK * _BLOCK
            sums = weights[:whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64)
            total = np.cumsum(np.append(sums, weights[whole:].sum(dtype=np.float64)))
            uniform *= total[-1]
            block = _first_above(total, uniform)
            uniform -= total[block - 1] if block else 0.0
            start = block * _BLOCK
            weights = weights[start : start + _BLOCK]
            total = np.cumsum(weights, dtype=np.float64)
        else:
            total = np.cumsum(weights, dtype=np.float64)
            uniform *= total[-1]
        return start + _first_above(total, uniform)

    def sample(self, logits: np.ndarray) -> int:
        """The next token for logits float32 [vocab]; the token counts as having occurred afterwards."""
        ids, weights = self._weights(logits, ())
        index = 0 if weights.size == 1 else self.draw(weights)
        token = index if ids is None else int(ids[index])
        if self.options.repetition_penalty != 1.0:
            self._seen[token] = True
        return token
