"""`--head-tokens`: a draft whose output layer knows the frequent tokens only."""

import numpy as np
import pytest
import tiny_models
from click.testing import CliRunner

from edgekv import bundle, engine
from edgekv.cli.export import command
from edgekv.errors import UserError
from edgekv.export import exporter, parity, replan
from edgekv.export.short_head import HeadOptions
from edgekv.generation.drafters.choose import choose
from edgekv.generation.drafters.vocabulary import read_token_ids
from edgekv.generation.session import Session
from edgekv.generation.text import load_tokenizer
from edgekv.policy import CachePolicy, parse_budget

POLICY = CachePolicy(element="fp32", boundary=32)
TEXT = "aaaa bbb cc the end of the text"


def short(model, target, tokens, *texts, weights="fp32"):
    return exporter.export(str(model), target, exporter.Options(POLICY, None, weights=weights, head=HeadOptions(tokens, texts)))


def logits(made, ids):
    loaded = engine.load(made, 1, max_rows=32)
    try:
        return Session(loaded).step(ids).copy()
    finally:
        loaded.close()


@pytest.mark.parametrize("name", ["llama-tied", "llama", "gpt2", "phi3"])  # tied and separate output layers
def test_logits_are_those_of_the_whole_model_for_the_tokens_that_stay(name, tmp_path):
    model, text = tiny_models.make(tmp_path / "model", name), tmp_path / "text"
    text.write_text(TEXT)
    made = short(model, tmp_path / "short", 20, text)
    kept = read_token_ids(made, tiny_models.VOCAB)
    assert kept.size == 20 == made.model["vocab"] and (np.diff(kept) > 0).all()
    assert {ord(letter) for letter in "aaaa bbb cc the"} <= set(kept.tolist())
    ids = tiny_models.random_text(24)
    want = tiny_models.expected(model, ids)[:, kept]
    assert np.abs(logits(made, ids) - want).max() < 1e-3
    facts = bundle.open_bundle(tmp_path / "short").manifest
    assert facts["draft"]["head_tokens"] == 20 and 0.9 < facts["draft"]["coverage"] <= 1 and facts["parity"]["argmax_agreement"] == 1


def test_without_texts_the_first_tokens_stay_and_those_that_end_a_text(llama, tmp_path):
    made = short(llama, tmp_path / "short", 40)
    kept = read_token_ids(made, tiny_models.VOCAB)
    ends = made.model["eos_token_ids"]
    assert kept.tolist() == sorted({*ends, *[token for token in range(40) if token not in ends][: 40 - len(ends)]})
    assert made.manifest["draft"]["coverage"] is None


def test_it_drafts_for_a_target_with_the_same_tokenizer_and_for_nothing_else(llama, llama_bundle, tmp_path):
    made = short(llama, tmp_path / "short", 40, weights="int8")
    drafter = choose(str(made.folder), llama_bundle, load_tokenizer(llama_bundle)).make(engine.load(llama_bundle, 1, max_rows=5))
    drafter.close()
    with pytest.raises(UserError, match="run its target with --draft"):
        load_tokenizer(made)


@pytest.mark.parametrize("tokens", [1, 100_000])
def test_counts_that_cannot_be_are_refused(llama, tmp_path, tokens):
    with pytest.raises(UserError, match="--head-tokens must be less than"):
        short(llama, tmp_path / "short", tokens)
    assert list(tmp_path.iterdir()) == []


def test_tokens_without_a_row_in_the_model_are_not_counted(tmp_path):
    """Tokenizers may know more than the model: added tokens that nobody made room for."""
    model, text = tiny_models.make(tmp_path / "model", "llama", vocab=200, bos_token_id=0, eos_token_id=1, pad_token_id=1), tmp_path / "text"
    text.write_text("a\u00ff\u00fe" * 50, encoding="utf-8")  # bytes above 200 among its tokens
    kept = read_token_ids(short(model, tmp_path / "short", 30, text), tiny_models.VOCAB)
    assert kept.max() < 200 and ord("a") in kept


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", None], ids=["empty", "binary", "a folder"])
def test_texts_that_hold_nothing_to_count(llama, tmp_path, content):
    text = tmp_path / "text"
    text.mkdir() if content is None else text.write_bytes(content)
    if content == b"":
        assert short(llama, tmp_path / "short", 40, text).manifest["draft"]["coverage"] is None
        return
    with pytest.raises(UserError, match="cannot be read as UTF-8 text"):
        short(llama, tmp_path / "short", 40, text)
    assert not (tmp_path / "short").exists()


def test_another_cache_for_a_draft(llama, tmp_path):
    made = short(llama, tmp_path / "short", 40)
    again = replan.replan(made, tmp_path / "again", CachePolicy(keep="window", positions="cache", element="fp32"), parse_budget("64tok"))
    assert again.manifest["draft"] == made.manifest["draft"]
    assert (read_token_ids(again, tiny_models.VOCAB) == read_token_ids(made, tiny_models.VOCAB)).all()


def test_command(llama, llama_bundle, tmp_path):
    def run(*arguments):
        return CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False, standalone_mode=False)

    text = tmp_path / "text"
    text.write_text(TEXT)
    done = run(llama, "-o", tmp_path / "short", "--weights", "int8", "--head-tokens", 64, "--head-text", text)
    assert done.exit_code == 0 and bundle.open_bundle(tmp_path / "short").model["vocab"] == 64
    assert "can say 64 tokens" in done.output and "100.0%" in done.output
    with pytest.raises(UserError, match="needs --head-tokens"):
        run(llama, "-o", tmp_path / "other", "--head-text", text)
    with pytest.raises(UserError, match="give another --head-text"):
        run(llama, "-o", tmp_path / "other", "--head-tokens", 64, "--head-text", tmp_path / "nothing")
    with pytest.raises(UserError, match="is a bundle"):
        run(llama_bundle.folder, "-o", tmp_path / "other", "--head-tokens", 64)
    assert not (tmp_path / "other").exists()


def test_perplexity_leaves_out_tokens_without_a_row():
    token_ids = np.array([2, 5, 7])
    assert parity.columns_of(np.array([5, 6, 7, 9, 2]), token_ids).tolist() == [1, -1, 2, -1, 0]
    even = np.zeros((4, 3), np.float32)
    assert parity.compare(even, even, np.array([1, -1, 2, 0])).perplexity_bundle == pytest.approx(3)
