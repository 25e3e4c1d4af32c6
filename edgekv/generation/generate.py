"""One answer: feeds the prompt, decodes, detokenises, and stops for the right reason."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from edgekv.engine import Reads
from edgekv.errors import UserError
from edgekv.generation.decoders import Decoder, plain
from edgekv.generation.sampling import Sampler
from edgekv.generation.session import Session
from edgekv.generation.text import Detokeniser, StopStrings

FINISH_REASONS = {
    "eos": "the model ended its answer",
    "stop": "a stop string was found",
    "length": "the wanted number of tokens was reached",
    "capacity": "the cache is full",
    "interrupted": "interrupted",
}


@dataclass
class Answer:
    """What one generation did.

    tokens         generated token ids, the end-of-text token left out
    text           all text that was emitted
    exact          whether the text stands for all of the tokens: not after a stop string or inside a character
    finish_reason  a key of FINISH_REASONS, empty while it runs
    fed            prompt tokens that were computed, i.e. not taken from the cache
    *_seconds      time in the prompt, in decoding (from the first token on), in compaction within both; the time that the
                   caller spends between two pieces of text is not counted
    reads          what decoding read of a compressed cache, None for others
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    exact: bool = True
    finish_reason: str = ""
    stop_string: str | None = None
    prompt_tokens: int = 0
    fed: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compaction_seconds: float = 0.0
    reads: Reads | None = None
    lengths: list[int] = field(default_factory=list, repr=False)  # of the text after each token, stop strings not yet cut off

    def settled(self) -> tuple[int, int]:
        """The longest beginning of the tokens that a beginning of the text stands for exactly: their number, its length."""
        if self.exact:
            return len(self.tokens), len(self.text)
        within = bisect.bisect_right(self.lengths, len(self.text))
        if within == 0:
            return 0, 0
        # a token that completed nothing may be half a character: go back to the one that brought the text to this length
        length = self.lengths[within - 1]
        return bisect.bisect_left(self.lengths, length) + 1, length


def check_prompt(session: Session, count: int) -> None:
    """Raises UserError when `count` more tokens cannot be fed, and says what would help."""
    capacity = session.engine.capacity
    if capacity is not None and session.position + count > capacity:
        raise UserError(
            f"The text has {session.position + count} tokens and this bundle ends at {capacity}; shorten it, or export with a "
            "larger --kv-budget, or with --keep window --positions cache, which never ends."
        )


def generate(
    session: Session,
    sampler: Sampler,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    answer: Answer,
    *,
    max_tokens: int | None = None,
    stop_strings: Sequence[str] = (),
    end_tokens: Sequence[int] = (),
    decoder: Decoder = plain,
    interrupted: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[str]:
    """Yields text as it becomes certain and fills `answer`, which is complete when the iterator ends.

    prompt       tokens after the committed text, at least one
    max_tokens   most tokens to generate; None: until the model ends
    end_tokens   token ids that end the answer
    interrupted  asked before every token and between prompt blocks

    Raises UserError when the prompt does not fit a cache that evicts nothing.
    """
    check_prompt(session, len(prompt))
    ends, compacted = frozenset(end_tokens), session.compaction_seconds
    detokeniser, stops = Detokeniser(tokenizer, prompt), StopStrings(stop_strings)
    clock = time.perf_counter
    start, first = clock(), session.position
    sampler.observe(prompt)
    logits = session.feed(prompt, interrupted, progress, foresee=True)
    answer.prompt_tokens = len(prompt)
    answer.fed = session.position - first
    produced = decoder(session, sampler, logits, max_tokens) if logits is not None else None
    answer.prefill_seconds = clock() - start
    if produced is None:
        answer.finish_reason = "interrupted"
        answer.compaction_seconds = session.compaction_seconds - compacted
        return

    compressed = session.engine.retrieval is not None
    before = session.engine.reads() if compressed else None
    while not answer.finish_reason:
        start, piece = clock(), ""
        if max_tokens is not None and len(answer.tokens) >= max_tokens:
            answer.finish_reason = "length"
        elif interrupted():
            answer.finish_reason = "interrupted"
        elif (token := next(produced, None)) is None:
            answer.finish_reason = "capacity"
        elif token in ends:
            answer.finish_reason = "eos"
        else:
            answer.tokens.append(token)
            piece = detokeniser.add(token)
            answer.lengths.append((answer.lengths[-1] if answer.lengths else 0) + len(piece))
            piece, answer.stop_string = stops.add(piece)
            if answer.stop_string is not None:
                answer.finish_reason = "stop"
        if answer.finish_reason and answer.finish_reason != "stop":
            more, answer.stop_string = stops.add(detokeniser.flush())
            piece += more + stops.flush()
        if answer.finish_reason:
            answer.reads = session.engine.reads().since(before) if compressed else None
            answer.exact = not detokeniser.cut and answer.stop_string is None
        answer.decode_seconds += clock() - start
        answer.compaction_seconds = session.compaction_seconds - compacted
        if piece:
            answer.text += piece
            yield piece
    produced.close()
