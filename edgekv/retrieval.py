"""How many compressed tokens a row attends to (cache selfindex), as people say it: a number, percent, or all."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from edgekv.errors import UserError

LEAST = 64  # tokens that a percentage stands for at least: in a short text fewer would save nothing and cost quality
MOST_RERANK = 64
MORE = 512  # tokens that are ranked again beside those that are retrieved, unless a run says otherwise


def candidates_for(retrieved: int, rerank: int | None) -> int:
    """How many of the best by their codes are ranked again by their stored keys; as many as are retrieved: none, codes decide.

    rerank: so many times the retrieved ones. None: MORE more. Codes put a token that matters in a wrong place among its neighbours, which are few in a short
    text as in a long one, and the more tokens stay, the less the last of them matters.
    """
    return retrieved + MORE if rerank is None else retrieved * rerank


@dataclass(frozen=True)
class Retrieval:
    """At most one of tokens and percent (of the compressed tokens); neither: all of them."""

    tokens: int | None = None
    percent: float | None = None

    def resolve(self, held: int) -> int:
        """What the state's header takes while `held` tokens are compressed: a number below `held`, or 0 for all."""
        wanted = self.tokens
        if self.percent is not None:
            wanted = max(LEAST, math.ceil(held * self.percent / 100))
        return 0 if wanted is None or wanted >= held else wanted

    @property
    def words(self) -> str:
        if self.percent is not None:
            return f"{self.percent:g}% of the compressed tokens"
        return "every compressed token" if self.tokens is None else f"{self.tokens} compressed tokens"

    def __str__(self) -> str:
        if self.percent is not None:
            return f"{self.percent:g}%"
        return "all" if self.tokens is None else str(self.tokens)


def parse_retrieval(text: object) -> Retrieval:
    """Read '96', '7.5%' or 'all'; UserError says what is accepted. Also for untrusted values of any type."""
    match = re.fullmatch(r"\s*(\d{1,8}(?:\.\d{1,6})?)\s*(%?)\s*", text, re.ASCII) if isinstance(text, str) else None
    if match and match[2] and 0 < float(match[1]) <= 100:
        return Retrieval(percent=float(match[1]))
    if match and not match[2] and "." not in match[1] and int(match[1]) > 0:
        return Retrieval(tokens=int(match[1]))
    if isinstance(text, str) and text.strip().lower() == "all":
        return Retrieval()
    raise UserError(
        f"retrieve takes a number of tokens (96), percent of the compressed tokens (7.5%) or all, not {text!r}."
    )
