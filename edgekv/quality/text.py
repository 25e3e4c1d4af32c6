"""The text that quality is measured on, and cutting it into sentences.

persuasion.txt beside this file holds chapters 1 to 6 of Persuasion by Jane Austen (1817, public domain), one paragraph per line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from edgekv.errors import UserError

SHIPPED = Path(__file__).with_name("persuasion.txt")
LEAST_WORDS = 200
_SENTENCE = re.compile(r"[^.!?]*[.!?]+[\"')\]]*\s+|[^.!?]+$", re.DOTALL)


@dataclass(frozen=True)
class Text:
    name: str
    content: str

    def sentences(self) -> list[str]:
        """The prose in order, each piece ending after a sentence, white space as single blanks, headings and fragments left out."""
        pieces = [" ".join(piece.split()) for piece in _SENTENCE.findall(self.content)]
        return [piece for piece in pieces if len(piece.split()) >= 4 and piece[-1] in ".!?\"')]"]


def shipped() -> Text:
    return Text("Persuasion, chapters 1 to 6", SHIPPED.read_text(encoding="utf-8"))


def check(text: Text) -> Text:
    """The text itself; UserError when it is too short to measure anything on."""
    if len(text.content.split()) < LEAST_WORDS:
        raise UserError(f"{text.name} has fewer than {LEAST_WORDS} words; give a longer text, or none to use the one that comes along.")
    return text
