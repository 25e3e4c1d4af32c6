"""How large the cache may be, as people say it: bytes, tokens or percent of the model's context."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgekv.errors import UserError

UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class Budget:
    """Exactly one of: bytes (the whole arena), tokens (body + tail) and percent (of the model's context, in tokens)."""

    bytes: int | None = None
    tokens: int | None = None
    percent: float | None = None

    def resolve(self, context: int) -> Budget:
        """Percent turned into tokens of a model with `context` tokens."""
        if self.percent is None:
            return self
        return Budget(tokens=int(context * self.percent / 100))

    def __str__(self) -> str:
        if self.bytes is not None:
            return format_bytes(self.bytes)
        return f"{self.tokens}tok" if self.tokens is not None else f"{self.percent:g}%"


def parse_budget(text: str) -> Budget:
    """Read '2MiB' (also B, KB, KiB, MB, GB, GiB), '1024tok' or '25%'; UserError says what is accepted."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]+|%)\s*", text, re.ASCII)
    number, unit = (match.group(1), match.group(2).lower()) if match else ("", "")
    if unit in UNITS and float(number) * UNITS[unit] >= 1:
        return Budget(bytes=int(float(number) * UNITS[unit]))
    if unit in ("tok", "token", "tokens") and "." not in number and int(number) > 0:
        return Budget(tokens=int(number))
    if unit == "%" and 0 < float(number) <= 100:
        return Budget(percent=float(number))
    raise UserError(
        f"The KV budget {text!r} is not understood: write bytes (2MiB), whole tokens (1024tok) "
        "or percent of the model's context up to 100% (25%)."
    )


def format_bytes(count: int) -> str:
    """'2 MiB', '1.5 KiB', '640 B'."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{count} B"
