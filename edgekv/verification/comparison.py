"""Engines against each other with polygraphy: each is a runner that keeps its cache in place, its comparator feeds all the same text.

The reference takes the tokens one by one, as decoding does; what is compared takes them in blocks, as verification does. So an engine
that agrees also shows that blocks change nothing.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgekv.engine import Engine
from edgekv.errors import UserError

BLOCK = 4  # most tokens of a block
MISSING = "the package polygraphy is not installed: pip install 'edgekv[tensorrt]'"


def polygraphy_missing() -> bool:
    from importlib.util import find_spec

    return find_spec("polygraphy") is None


def text_blocks(vocab: int, boundary: int, length: int) -> list[dict[str, np.ndarray]]:
    """A random text as feeds of runners: tokens int64 [1..BLOCK] and position int64 [1], no block across a boundary."""
    random = np.random.default_rng(0)
    text, feeds, position = random.integers(0, vocab, length), [], 0
    while position < length:
        count = min(int(random.integers(1, BLOCK + 1)), boundary - position % boundary, length - position)
        feeds.append({"tokens": text[position : position + count], "position": np.array([position])})
        position += count
    return feeds


def make_runner(name: str, load: Callable[[], Engine], one_by_one: bool = False) -> Any:
    """A polygraphy runner of an engine, loaded when the runner is activated; infers logits float32 [T, vocab]."""
    from polygraphy.backend.base import BaseRunner
    from polygraphy.common import TensorMetadata

    class EngineRunner(BaseRunner):
        def activate_impl(self) -> None:
            self.engine = load()

        def deactivate_impl(self) -> None:
            self.engine.close()
            del self.engine

        def get_input_metadata_impl(self) -> Any:
            return TensorMetadata().add("tokens", np.dtype(np.int64), (None,)).add("position", np.dtype(np.int64), (1,))

        def infer_impl(self, feed_dict: dict[str, np.ndarray]) -> OrderedDict:
            started = time.perf_counter()
            logits = self.logits(feed_dict["tokens"], int(feed_dict["position"][0]))
            self.inference_time = time.perf_counter() - started  # the base class asks for it
            return OrderedDict(logits=logits)

        def logits(self, tokens: np.ndarray, position: int) -> np.ndarray:
            if position and position % self.engine.boundary == 0:
                self.engine.compact(position)
            if one_by_one:
                steps = [self.engine.step(tokens[i : i + 1], position + i, np.zeros(1, np.int64))[0].copy() for i in range(len(tokens))]
                return np.stack(steps)
            return self.engine.step(tokens, position, np.arange(len(tokens))).copy()

    return EngineRunner(name=name)


@dataclass
class Agreement:
    """How alike the distributions of the next token are, over all positions of a text."""

    divergences: list[float] = field(default_factory=list)  # KL(reference || other) in nats, one per position
    same: int = 0  # positions with the same best token

    def add(self, reference: np.ndarray, other: np.ndarray) -> None:
        """Logits [T, vocab] of both."""
        a, b = (log_softmax(np.asarray(x, np.float64)) for x in (reference, other))
        self.divergences += (np.exp(a) * (a - b)).sum(axis=-1).tolist()
        self.same += int((reference.argmax(-1) == other.argmax(-1)).sum())

    def passes(self, threshold: float) -> bool:
        mean = float(np.mean(self.divergences))
        return bool(np.isfinite(mean) and mean <= threshold)

    def words(self, threshold: float) -> str:
        mean, worst = float(np.mean(self.divergences)), float(np.max(self.divergences))
        return (
            f"mean KL {mean:.2e}, largest {worst:.2e} nats, same best token {self.same} of {len(self.divergences)} times "
            f"(mean KL at most {threshold:g})"
        )


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


class Comparison:
    """Runs the reference once, then compares whatever is given with it."""

    def __init__(self, reference: Any, feeds: list[dict[str, np.ndarray]]):
        self.feeds = feeds
        self._expected = self._run(reference)

    def _run(self, runner: Any) -> Any:
        from polygraphy.comparator import Comparator
        from polygraphy.logger import G_LOGGER

        with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
            return Comparator.run([runner], data_loader=self.feeds)

    def against(self, runner: Any) -> Agreement:
        """UserError or NativeError when the runner's engine refuses."""
        from polygraphy.comparator import Comparator, RunResults
        from polygraphy.logger import G_LOGGER

        found = Agreement()

        def compare(expected: Any, given: Any) -> OrderedDict:
            found.add(expected["logits"], given["logits"])
            return OrderedDict(logits=bool(np.isfinite(found.divergences[-1])))

        both = RunResults()
        both.extend([*self._expected.items(), *self._run(runner).items()])
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
            Comparator.compare_accuracy(both, compare_func=compare)
        if len(found.divergences) != sum(len(feed["tokens"]) for feed in self.feeds):
            raise UserError("polygraphy compared only a part of the text; install a version that edgekv knows (0.49 or newer).")
        return found
