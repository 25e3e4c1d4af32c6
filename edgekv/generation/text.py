"""Between token ids and text: loading the tokenizer, emitting text as tokens arrive, stopping at strings."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from edgekv.bundle import Bundle
from edgekv.errors import BundleError

TOKENIZER = "tokenizer.json"
DRAFT_TOKENS = "draft_tokens.bin"  # in a draft with a shortened output layer: little-endian int32 per row, the token it stands for
_CONTEXT = 8  # prompt tokens before the answer that decide whether its first word starts with a space
_MOST_HELD = 8  # tokens held back for an incomplete character: UTF-8 needs four bytes, hence four tokens at most
_REPLACEMENT = "\ufffd"


def load_tokenizer(bundle: Bundle, draft: bool = False) -> Tokenizer:
    """The bundle's tokenizer, without truncation or padding; raises BundleError when the file is missing or unreadable.

    draft  accept a bundle that gives logits for some of the tokens only, and can do nothing but draft
    """
    if bundle.file(DRAFT_TOKENS) is not None and not draft:
        raise BundleError(f"{bundle.folder} is a draft, which knows only some tokens; run its target with --draft {bundle.folder}.")
    path = bundle.file(TOKENIZER)
    if path is None:
        raise BundleError(f"{bundle.folder} has no {TOKENIZER}; export the bundle again from a model that has a tokenizer.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic in the Rust library is no Exception
        raise BundleError(f"{path} is not a readable tokenizer: {error}; export the bundle again.") from None
    if tokenizer.get_vocab_size() > bundle.model["vocab"] and not draft:
        raise BundleError(
            f"{path} knows {tokenizer.get_vocab_size()} tokens but the model only {bundle.model['vocab']}; "
            "the tokenizer belongs to another model."
        )
    return tokenizer


class Detokeniser:
    """Turns a stream of tokens into a stream of text that never ends inside a character.

    Decoding a token alone is wrong (spaces, byte pieces), and decoding everything each time is quadratic. So a short window
    is decoded with and without the new token, and the difference is emitted once it is complete.

    context  tokens before the stream, usually the end of the prompt
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self.cut = False  # whether flush left such a character out
        self._ids = [int(token) for token in context[-_CONTEXT:]]
        self._read = len(self._ids)  # tokens of the window whose text was emitted
        self._prefix = tokenizer.decode(self._ids) if self._ids else ""

    def add(self, token: int) -> str:
        """Text that this token completes, empty while a character is incomplete."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        # special tokens show nothing: they must not become all of the window, or the next word would lose its space
        if (text.endswith(_REPLACEMENT) or text == self._prefix) and len(self._ids) - self._read < _MOST_HELD:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """Text still held at the end of the stream, without a character that was never completed."""
        piece = self._advance(self._tokenizer.decode(self._ids))
        whole = piece.rstrip(_REPLACEMENT)
        self.cut = len(whole) < len(piece)
        return whole

    def _advance(self, text: str) -> str:
        piece = text[len(self._prefix) :]
        self._ids = self._ids[self._read :] or self._ids[-1:]
        self._read = len(self._ids)
        self._prefix = self._tokenizer.decode(self._ids)
        return piece


class StopStrings:
    """Ends a stream of text at the first occurrence of any of some strings, wherever token borders fall.

    Text that could be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str] = ()):
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def add(self, piece: str) -> tuple[str, str | None]:
        """Text that may be shown, and the stop string that was found, if any; nothing may be added after that."""
        text = self._held + piece
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            start, stop = min(found)
            self._held = ""
            return text[:start], stop
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back although no stop string followed."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of `stop`."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if stop.startswith(text[-length:]):
                return length
        return 0
