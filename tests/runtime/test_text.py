"""Text as tokens arrive: never inside a character, stop strings across token borders."""

import pytest
import tiny_bundle
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edgekv.errors import BundleError
from edgekv.generation.text import Detokeniser, StopStrings, load_tokenizer

BYTES = tiny_bundle.byte_tokenizer()


def metaspace_tokenizer():
    """Words with a leading marker, and bytes for everything else, as SentencePiece models have them."""
    pieces = ["<unk>", "▁Hello", "▁world", "!", "▁", *(f"<0x{b:02X}>" for b in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


@given(st.text(max_size=60), st.text(max_size=20))
def test_pieces_join_to_the_text_and_none_is_broken(text, context):
    detokeniser = Detokeniser(BYTES, BYTES.encode(context).ids)
    pieces = [detokeniser.add(token) for token in BYTES.encode(text).ids]
    pieces.append(detokeniser.flush())
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert not detokeniser.cut


def test_characters_come_out_as_soon_as_they_are_complete():
    detokeniser = Detokeniser(BYTES)
    assert [detokeniser.add(b) for b in "a€é".encode()] == ["a", "", "", "€", "", "é"]


def test_a_character_cut_by_the_end_is_left_out():
    detokeniser = Detokeniser(BYTES)
    pieces = [detokeniser.add(b) for b in "ok 😀".encode()[:-1]]
    assert "".join(pieces) + detokeniser.flush() == "ok " and detokeniser.cut


def test_bytes_that_never_become_text_do_not_hold_the_stream_forever():
    detokeniser = Detokeniser(BYTES)
    pieces = [detokeniser.add(b) for b in b"\xff" * 50 + b"end"]
    assert "".join(pieces).endswith("end") and max(map(len, pieces)) <= 9


def test_words_keep_their_spaces_and_special_tokens_show_nothing():
    tokenizer = metaspace_tokenizer()
    hello, world, mark, space, first_byte, end = 1, 2, 3, 4, 5, tokenizer.token_to_id("</s>")
    tokens = [hello, world, mark, end, world, space, *(first_byte + b for b in "é".encode())]
    alone, after = Detokeniser(tokenizer), Detokeniser(tokenizer, [hello])
    assert "".join(map(alone.add, tokens)) + alone.flush() == tokenizer.decode(tokens) == "Hello world! world é"
    assert "".join(map(after.add, tokens)) + after.flush() == " Hello world! world é"


def test_work_per_token_does_not_grow():
    class Counting:
        longest = 0

        def decode(self, ids):
            self.longest = max(self.longest, len(ids))
            return BYTES.decode(ids)

    counting = Counting()
    detokeniser = Detokeniser(counting)
    for token in b"abc\xff\xff" * 1000:
        detokeniser.add(token)
    assert counting.longest < 32


@given(st.text("abX", max_size=30), st.lists(st.text("abX", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_wherever_the_borders_fall(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matcher, shown, found = StopStrings(stops), "", None
    for piece in pieces:
        more, found = matcher.add(piece)
        shown += more
        assert text.startswith(shown)
        if found:
            break
    else:
        shown += matcher.flush()
    if found:
        assert text[len(shown) :].startswith(found)
        # nothing that was shown contains a stop string, not even its end together with what follows
        assert not any(stop in shown for stop in stops)
    else:
        assert shown == text and not any(stop in text for stop in stops)


def test_text_is_held_back_only_while_a_stop_string_may_follow():
    matcher = StopStrings(["END"])
    assert [matcher.add(p) for p in ("aE", "N", "x", "EEN", "D z")] == [("a", None), ("", None), ("ENx", None), ("E", None), ("", "END")]


def test_tokenizer_files_that_are_none(tmp_path):
    made = tiny_bundle.make(tmp_path / "b")
    for text in ("", "{}", '{"model": 3}', "[" * 10_000):
        (made.folder / "tokenizer.json").write_text(text)
        with pytest.raises(BundleError, match="not a readable tokenizer"):
            load_tokenizer(made)


def test_pain_16_tokenizer_of_another_model(tmp_path):
    made = tiny_bundle.make(tmp_path / "b", change=lambda m: m["model"].update(vocab=100))
    with pytest.raises(BundleError, match="belongs to another model"):
        load_tokenizer(made)
