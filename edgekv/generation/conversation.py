"""A conversation with a model through its chat template, continued in the cache wherever the text allows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer

from edgekv.errors import UserError
from edgekv.generation.generate import Answer, generate
from edgekv.generation.sampling import Sampler
from edgekv.generation.session import Session
from edgekv.generation.template import ChatTemplate

_RESERVE = 8  # divides the capacity: the share of it that an answer should at least find free


def common_prefix(a: Any, b: Any) -> int:
    """Number of leading items that two sequences share."""
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


class Conversation:
    """Messages, and the tokens that stand for them in the session.

    The template renders the whole conversation at each turn. When that extends what the model has read and written, only the new
    end is tokenised and fed. When it differs near the end (a template that trims answers, a stop string), the tail of
    the cache is rewound; when it differs earlier (a template that drops old reasoning), the cache starts over and the
    conversation streams through it again.
    """

    def __init__(self, session: Session, sampler: Sampler, tokenizer: Tokenizer, template: ChatTemplate, system: str | None = None):
        self.session, self.sampler, self.tokenizer, self.template = session, sampler, tokenizer, template
        self.messages = [{"role": "system", "content": system}] if system else []
        self.forgotten = 0  # messages dropped because the cache evicts nothing and was full
        self._text = ""  # rendered text that `_tokens` stands for
        self._tokens: list[int] = []

    def clear(self) -> None:
        """Forgets everything but the system message."""
        del self.messages[1 if self.messages and self.messages[0]["role"] == "system" else 0 :]
        self.session.reset()
        self.sampler.forget()
        self._text, self._tokens, self.forgotten = "", [], 0

    def ask(self, content: str, answer: Answer, **options: Any) -> Iterator[str]:
        """Adds the user's message and yields the model's answer; options are those of `generate`.

        Raises UserError, with the conversation as it was before, when the message cannot be fed.
        """
        self.messages.append({"role": "user", "content": content})
        try:
            tokens, text = self._fit()
        except UserError:
            self.messages.pop()
            raise
        kept = self._continue_from(tokens)
        self._tokens, self._text = tokens, text
        yield from generate(self.session, self.sampler, self.tokenizer, tokens[kept:], answer, **options)
        answer.prompt_tokens = len(tokens)
        self.messages.append({"role": "assistant", "content": answer.text})
        count, length = answer.settled()
        self._tokens, self._text = tokens + answer.tokens[:count], text + answer.text[:length]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _render(self) -> tuple[list[int], str]:
        text = self.template.render(self.messages)
        if self._text and text.startswith(self._text):
            return self._tokens + self._encode(text[len(self._text) :]), text
        return self._encode(text), text

    def _fit(self) -> tuple[list[int], str]:
        """The rendered conversation, without its oldest exchanges when the cache could not hold it and an answer."""
        tokens, text = self._render()
        capacity = self.session.engine.capacity
        while capacity is not None and len(tokens) > capacity - capacity // _RESERVE:
            first = 1 if self.messages[0]["role"] == "system" else 0
            if len(self.messages) - first < 3:
                if len(tokens) < capacity:
                    break
                raise UserError(
                    f"The message makes the conversation {len(tokens)} tokens long and this bundle ends at {capacity}; "
                    "shorten it, or export with a larger --kv-budget or with --keep window --positions cache."
                )
            del self.messages[first : first + 2]
            self.forgotten += 2
            tokens, text = self._render()
        if not tokens:
            raise UserError("The chat template made an empty text of this conversation.")
        return tokens, text

    def _continue_from(self, tokens: list[int]) -> int:
        """Brings the session to the longest beginning of `tokens` it can; returns its length, below len(tokens)."""
        common = min(common_prefix(self.session.tokens, tokens), len(tokens) - 1)
        if common == self.session.position or self.session.rewind(common):
            return common
        self.session.reset()
        return 0
