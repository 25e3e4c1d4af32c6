"""`edgekv run --draft` as a process: the same text, the figures, the refusals."""

import json

import pytest
import tiny_bundle
from tiny_bundle import follow

RUN = ["-n", "200", "--ignore-eos", "--json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("bundles")
    tiny_bundle.make(root / "target")
    tiny_bundle.make(root / "draft", kept=32, boundary=48, chunk=48)  # the same weights in another cache
    tiny_bundle.make(root / "useless", seed=9, layers=1)
    tiny_bundle.make(root / "hi", attention=0.0, follows=follow("Hi né!"))
    tokenizer = tiny_bundle.byte_tokenizer()
    tokenizer.add_tokens(["extra"])
    tiny_bundle.make(root / "other", tokenizer=tokenizer, change=lambda manifest: manifest["model"].update(vocab=261))
    return root


@pytest.mark.parametrize("draft", ["draft", "useless", "ngram", "self", "self:16"])
@pytest.mark.parametrize("gamma", [(), ("--gamma", "5")])
def test_greedy_text_does_not_depend_on_drafts(edgekv, folder, draft, gamma):
    spec = draft if draft in ("ngram", "self", "self:16") else folder / draft
    wanted = json.loads(edgekv("run", folder / "target", "-p", "a text", *RUN).stdout)
    answer = json.loads(edgekv("run", folder / "target", "-p", "a text", *RUN, "--draft", spec, *gamma).stdout)
    assert answer["token_ids"] == wanted["token_ids"]
    told = answer["drafting"]
    assert told["gamma"] == (5 if gamma else None)
    assert told["drafting_steps"] <= told["target_steps"] and told["accepted_tokens"] <= told["drafted_tokens"]
    assert told["tokens_per_target_step"] * told["target_steps"] >= 198
    if gamma and draft != "ngram":
        assert told["drafted_tokens"] > 100 and 0 <= told["acceptance_rate"] <= 1
        assert told["draft_seconds"] > 0 and told["verify_seconds"] > 0
        assert (told["draft_kv_bytes"] > 0) == draft.startswith(("draft", "useless"))
        steps = told["target_steps"] + (told["drafted_tokens"] if draft.startswith("self") else 0)
        share = told["target_weight_bytes_per_token"] / told["plain_weight_bytes_per_token"]
        assert share == pytest.approx(steps / (told["tokens_per_target_step"] * told["target_steps"]), rel=1e-3)
    if draft == "draft" and gamma:
        assert told["acceptance_rate"] > 0.3 and told["weight_traffic_cut"] > 1.2


def test_pain_19_a_useless_draft_is_given_up_and_its_acceptance_told(edgekv, folder):
    arguments = ["run", folder / "target", "-p", "x", *RUN[:-1], "--draft", folder / "useless"]
    told = json.loads(edgekv(*arguments, "--json").stdout)["drafting"]
    assert told["drafting_steps"] < 40
    assert 0 <= told["acceptance_rate"] < 0.5
    assert " tokens drafted, " in edgekv(*arguments).stderr.decode()


def test_compare_runs_both_and_says_so(edgekv, folder):
    arguments = ["run", folder / "target", "-p", "some text", "-n", "60", "--ignore-eos", "--draft", "ngram", "--compare"]
    compared = json.loads(edgekv(*arguments, "--json").stdout)["compare"]
    assert compared["same_tokens"] and compared["greedy"]
    assert compared["speedup"] == pytest.approx(
        compared["decode_tokens_per_second"] / compared["plain_decode_tokens_per_second"], rel=1e-2
    )
    report = edgekv(*arguments).stderr.decode()
    for words in ("draft     ngram, adaptive length", "steps     ", "weights   ", "compare   ", "same text"):
        assert words in report


def test_what_was_not_wanted_of_a_round_does_not_count(edgekv, folder):
    """16 tokens drafted by the model itself, all right, and the answer ends within them."""
    arguments = ["run", folder / "hi", "-p", "H", "--json"]
    assert json.loads(edgekv(*arguments).stdout)["text"] == "i né!"
    told = json.loads(edgekv(*arguments, "--stop", "n", "--draft", folder / "hi", "--gamma", "16").stdout)["drafting"]
    assert told["accepted_tokens"] > 2 and told["tokens_per_target_step"] == 2 and told["target_steps"] == 1


def test_nothing_is_drafted_behind_the_last_token(edgekv, folder):
    for count in (1, 2, 6):
        arguments = ["run", folder / "target", "-p", "x", "-n", str(count), "--ignore-eos", "--draft", folder / "target", "--gamma", "16"]
        told = json.loads(edgekv(*arguments, "--json").stdout)["drafting"]
        assert told["drafted_tokens"] == max(0, count - 2) and told["drafter"] == str(folder / "target")


def test_seeds_repeat_a_drafted_text(edgekv, folder):
    arguments = ["run", folder / "target", "-p", "x", "-n", "40", "--temperature", "1", "--draft", folder / "draft", "--gamma", "3", "--json"]
    first = json.loads(edgekv(*arguments).stdout)
    again = json.loads(edgekv(*arguments, "--seed", first["seed"]).stdout)
    assert first["token_ids"] == again["token_ids"]


def test_a_conversation_drafts_too(edgekv, folder):
    talk = json.loads(edgekv("run", folder / "hi", "--chat", "--json", "--draft", "ngram", "--gamma", "4", stdin=b"one\ntwo\n").stdout)
    assert [turn["text"] for turn in talk["turns"]] == ["Hi né!"] * 2
    assert talk["drafting"]["accepted_tokens"] > 0  # the second answer repeats the first


@pytest.mark.parametrize(
    "options,words",
    [
        (["--draft", "nowhere"], "there is nothing at nowhere"),
        (["--draft", "self:x"], "self:WINDOW"),
        (["--gamma", "3"], "add --draft"),
        (["--compare"], "add --draft"),
        (["--draft", "ngram", "--compare", "--chat"], "leave out --chat"),
        (["--kv-limit", "1KiB"], "more than the --kv-limit of 1,024; export with a smaller --kv-budget."),
        (["--kv-limit", "much"], "--kv-limit is a number of bytes, like 3MiB, not 'much'."),
        (["--draft", "self:" + "1" * 5000], "a number of tokens from 16 to 1,048,576, not '111"),
        (["--draft", "self:"], "a number of tokens from 16 to 1,048,576, not ''."),
        (["--draft", "a" * 300], "File name too long"),
        (["--kv-limit", "12tok"], "number of bytes"),
    ],
)
def test_refusals(refused, folder, options, words):
    assert words in refused("run", folder / "target", "-p", "x", *options)


def test_a_draft_with_another_tokenizer_is_refused_by_the_first_difference(refused, folder):
    message = refused("run", folder / "target", "-p", "x", "--draft", folder / "other")
    assert "token 260 is unknown in the target and 'extra' in the draft" in message


def test_both_caches_count_against_the_limit(edgekv, refused, folder):
    import edgekv.bundle as bundles

    sizes = [bundles.open_bundle(folder / name).arena_bytes for name in ("target", "draft")]
    message = refused("run", folder / "target", "-p", "x", "--draft", folder / "draft", "--kv-limit", f"{sum(sizes) - 1}B")
    assert "of the target" in message and "of the draft" in message
    done = edgekv("run", folder / "target", "-p", "x", "-n", "3", "--draft", folder / "draft", "--kv-limit", f"{sum(sizes)}B")
    assert done.returncode == 0
