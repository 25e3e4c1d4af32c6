"""Prompt look-up, grades, and whether two tokenizers are the same."""

import json
from array import array

import numpy as np
import pytest
import tiny_bundle
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from edgekv.errors import UserError
from edgekv.generation.adaptive import FixedLength
from edgekv.generation.drafters import logits
from edgekv.generation.drafters.choose import check_caches, choose
from edgekv.generation.drafters.ngram import LONGEST, NgramDrafter, look_up
from edgekv.generation.drafters.vocabulary import first_difference, read_token_ids
from edgekv.generation.sampling import Sampler, SamplingOptions

SAMPLER = Sampler(SamplingOptions(), 300)


def proposed(text, gamma=4):
    length = FixedLength(gamma)
    length.start(gamma)
    return NgramDrafter().draft(array("i", text[:-1]), text[-1], length, SAMPLER)


def by_definition(text):
    """The longest suffix that occurred before and where its latest occurrence ends, by trying all."""
    for size in range(min(LONGEST, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                return end, size
    return len(text), 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_look_up_finds_the_longest_then_latest_match(text):
    assert look_up(np.array(text[:-1], np.int32), text[-1]) == by_definition(text)


def test_proposals_are_what_followed():
    draft = proposed([5, 6, 7, 8, 9, 1, 2, 5, 6, 7])
    assert draft.tokens == [8, 9, 1, 2] and draft.laws == [None] * 4
    assert draft.grades == [2, 3, 4, 5]  # three tokens matched, then four, ...


def test_a_match_at_the_end_goes_on_into_the_draft():
    assert proposed([1, 2, 3, 1, 2, 3, 1], 8).tokens == [2, 3, 1, 2, 3, 1, 2, 3]
    assert proposed([4, 4], 5).tokens == [4] * 5


@pytest.mark.parametrize("text", [[1], [1, 2], [1, 2, 3]])
def test_nothing_is_proposed_without_a_match(text):
    assert proposed(text).tokens == []


def test_long_texts_are_searched_without_growing_anything():
    text = list(range(200_000)) + [1000, 1001]  # what follows 1000, 1001 lies outside of what is searched
    assert proposed(text).tokens == []
    assert proposed(text[:-2] + [199_000, 199_001]).tokens == [199_002, 199_003, 199_004, 199_005]


def test_grades_follow_the_lead_of_the_best_token():
    row = np.zeros(50, np.float32)
    seen = []
    for lead in (0.0, 0.3, 0.7, 1.2, 1.7, 2.5, 3.5, 5.0, 20.0):
        row[7] = lead
        before = row.copy()
        seen.append(logits.grade(row))
        assert (row == before).all()
    assert seen == list(range(logits.GRADES))
    assert logits.grade(np.full(5, np.nan, np.float32)) is None
    assert logits.grade(np.full(5, -np.inf, np.float32)) is None
    alone = np.full(5, -np.inf, np.float32)
    alone[2] = 1.0
    assert logits.grade(alone) == logits.GRADES - 1


# ---- tokenizers


def changed(change):
    data = json.loads(tiny_bundle.byte_tokenizer().to_str())
    change(data)
    return Tokenizer.from_str(json.dumps(data))


def rename(data):
    vocab = data["model"]["vocab"]
    vocab["x!"] = vocab.pop("x")


def merge(data):
    data["model"]["vocab"]["th"] = 256
    data["model"]["merges"] = [["t", "h"]]
    for token in data["added_tokens"]:
        token["id"] += 1


def test_equal_tokenizers_are_equal_whatever_they_do_to_prompts():
    assert first_difference(tiny_bundle.byte_tokenizer(), tiny_bundle.byte_tokenizer()) is None
    padded = tiny_bundle.byte_tokenizer()
    padded.enable_padding(pad_id=1, pad_token="<eos>")
    assert first_difference(tiny_bundle.byte_tokenizer(), padded) is None


@pytest.mark.parametrize(
    "change,sentence",
    [
        (rename, "token 120 is 'x' in the target and 'x!' in the draft"),
        (merge, "token 256 is '<bos>' in the target and 'th' in the draft"),
        (lambda data: data["added_tokens"].pop(), "token 259 is '<bot>' in the target and unknown in the draft"),
        (lambda data: data["pre_tokenizer"].update(add_prefix_space=True), "their pre-tokenizers differ"),
        (lambda data: data.update(normalizer={"type": "NFC"}), "their normalizers differ"),
    ],
)
def test_the_first_difference_is_named(change, sentence):
    assert first_difference(tiny_bundle.byte_tokenizer(), changed(change)) == sentence


def test_merges_are_compared_in_order():
    def merges(first, second):
        def change(data):
            data["model"]["vocab"] |= {"th": 256, "he": 257}
            data["model"]["merges"] = [first, second]
            data["added_tokens"] = []

        return changed(change)

    a, b = merges(["t", "h"], ["h", "e"]), merges(["h", "e"], ["t", "h"])
    assert first_difference(a, b) == "merge 0 joins 't' and 'h' in the target, 'h' and 'e' in the draft"
    assert first_difference(a, merges(["t", "h"], ["h", "e"])) is None


# ---- choosing


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_bundle.make(tmp_path_factory.mktemp("target") / "bundle")


def refusal(spec, target):
    with pytest.raises(UserError) as caught:
        choose(spec, target, tiny_bundle.byte_tokenizer())
    return str(caught.value)


def test_what_cannot_draft_is_refused_with_a_sentence(target, tmp_path):
    assert "ngram, self, self:WINDOW" in refusal("nothing-here", target)
    assert "number of tokens" in refusal("self:wide", target)
    assert "number of tokens" in refusal("self:3", target)
    other = tiny_bundle.make(tmp_path / "other", tokenizer=changed(rename))
    assert "token 120 is 'x' in the target and 'x!' in the draft" in refusal(str(other.folder), target)


def test_caches_are_limited_together(target, tmp_path):
    draft = tiny_bundle.make(tmp_path / "draft", layers=1)
    both = target.arena_bytes + draft.arena_bytes
    check_caches(target, draft, both)
    check_caches(target, None, target.arena_bytes)
    with pytest.raises(UserError, match="of the target, .* of the draft"):
        check_caches(target, draft, both - 1)


def test_token_lists_of_drafts_are_checked(target, tmp_path):
    def with_list(name, data):
        return tiny_bundle.make(tmp_path / name, files={"draft_tokens.bin": data})

    vocab = tiny_bundle.VOCAB
    good = with_list("good", np.arange(vocab, dtype="<i4")[::-1].tobytes())
    assert list(read_token_ids(good, vocab)) == list(range(vocab))[::-1]
    assert read_token_ids(target, vocab) is None
    for name, ids in (("short", np.arange(5)), ("twice", np.zeros(vocab)), ("outside", np.arange(1, vocab + 1))):
        with pytest.raises(UserError, match="does not name"):
            read_token_ids(with_list(name, ids.astype("<i4").tobytes()), vocab)
    with pytest.raises(UserError, match="cannot be read"):
        read_token_ids(with_list("odd", b"abc"), vocab)
