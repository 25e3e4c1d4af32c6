"""`edgekv draft` on a small model: cut, trained, resumed, exported, and used."""

import itertools
import json

import numpy as np
import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM

from edgekv import engine
from edgekv.bundle import open_bundle
from edgekv.errors import UserError
from edgekv.export import draft, draft_corpus, draft_student, draft_train, exporter, load, parity
from edgekv.generation.adaptive import FixedLength
from edgekv.generation.decoders import plain
from edgekv.generation.drafters.choose import choose
from edgekv.generation.sampling import Sampler, SamplingOptions
from edgekv.generation.session import Session
from edgekv.generation.speculation import Speculation
from edgekv.generation.text import load_tokenizer
from edgekv.policy import CachePolicy, parse_budget


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small are slowed down by threads that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A model of four layers whose middle ones do little, so that a draft without them has a chance to learn."""
    folder = tmp_path_factory.mktemp("target") / "model"
    tiny_models.make(folder, "llama", num_hidden_layers=4, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers[1:3]:
            for parameter in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                parameter.mul_(0.4)
    tiny_models.save(folder, model)
    return folder


def options(**changes):
    policy = CachePolicy(keep="window", positions="cache", element="fp32", boundary=32)
    export = exporter.Options(policy, parse_budget("128tok"), weights="fp32", force=changes.pop("force", False))
    return draft.Options(export=export, **{"layers": 2, "head_tokens": 128, "tokens": 32 * 64, "length": 64, "passes": 2.0, **changes})


@pytest.fixture(scope="module")
def made(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft") / "bundle"
    told = []
    result = draft.make(str(target), folder, options(), lambda *stage: told.append(stage))
    return result, told, folder


@pytest.mark.parametrize(
    "count,wanted,kept",
    [(30, 6, [0, 1, 2, 11, 20, 29]), (4, 2, [0, 3]), (4, 1, [0]), (5, 3, [0, 1, 4]), (24, 4, [0, 1, 12, 23]), (3, 2, [0, 2])],
)
def test_layers_are_kept_from_the_front_and_spread_to_the_last(count, wanted, kept):
    assert draft_student.layers_to_keep(count, wanted) == kept


def test_cutting_nothing_changes_nothing(target):
    teacher = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ids = torch.from_numpy(tiny_models.random_text(40))[None]
    rows = np.array([3, 7, 200])
    student = draft_student.cut(teacher, [0, 1, 2, 3], rows).eval()
    with torch.no_grad():
        torch.testing.assert_close(student(ids).logits, teacher(ids).logits[..., rows], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "gpt_neox", "opt"])
def test_other_architectures_can_be_cut_and_written(name, tmp_path):
    folder = tiny_models.make(tmp_path / "model", name, num_hidden_layers=3)
    source = load.find(str(folder))
    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = np.arange(0, 260, 2)
    student = draft_student.cut(teacher, [0, 2], rows)
    draft_student.save(student, tmp_path / "student")
    small = draft_student.source_of(source, tmp_path / "student", student.config, rows)
    policy = CachePolicy(keep="full", element="fp32", boundary=32)
    bundle = exporter.export_source(small, tmp_path / "bundle", exporter.Options(policy, None, weights="fp32", check_parity=False))
    assert (bundle.model["layers"], bundle.model["vocab"]) == (2, 130)
    ids = tiny_models.random_text(60)
    with torch.no_grad():
        want = student.eval()(torch.from_numpy(ids)[None]).logits[0].numpy()
    loaded = engine.load(bundle, 1, max_rows=32)
    session = Session(loaded)
    got = [session.step(ids[:20]).copy()]
    session.commit(20)
    got.append(session.step(ids[20:32]).copy())
    assert np.abs(np.concatenate(got) - want[:32]).max() < 1e-3
    loaded.close()


def test_the_draft_learns_and_says_what_it_is(made, target):
    result, told, folder = made
    facts = json.loads((folder / "manifest.json").read_text())["draft"]
    assert facts["layers"] == [0, 3] and facts["head_tokens"] == 128 and facts["target_layers"] == 4
    assert facts["greedy_acceptance"] == result.agreement.greedy and 0 < facts["coverage"] <= 1
    untrained = draft.make(str(target), folder.parent / "untrained", options(passes=0.01))
    assert result.agreement.greedy > untrained.agreement.greedy
    assert result.agreement.sampled > untrained.agreement.sampled
    assert 0 < result.agreement.sampled <= 1 and result.agreement.tokens > 0
    stages = [stage.split(",")[0] for stage, *_ in told]
    assert {"the target writes", "training", "measuring", "sealing"} <= set(stages)
    assert not (folder.parent / "bundle.training").exists()


def test_the_bundle_drafts_for_its_target_and_for_nothing_else(made, target, tmp_path):
    result, _, folder = made
    policy = CachePolicy(keep="heavy", element="fp32", boundary=32)
    big = exporter.export(str(target), tmp_path / "target", exporter.Options(policy, parse_budget("96tok"), weights="fp32", check_parity=False))
    loaded = engine.load(big, 1, max_rows=9)
    drafter = choose(str(folder), big, load_tokenizer(big)).make(loaded)
    prompt = list(b"some beginning")
    texts = []
    decoder = Speculation(drafter, FixedLength(4), loaded.vocab)
    for way in (plain, decoder):
        session = Session(loaded)
        texts.append(list(itertools.islice(way(session, Sampler(SamplingOptions(), loaded.vocab), session.feed(prompt)), 150)))
    assert texts[0] == texts[1]
    assert decoder.tally.accepted > 0
    drafter.close(), loaded.close()
    with pytest.raises(UserError, match="run its target with --draft"):
        load_tokenizer(open_bundle(folder))


def test_a_run_that_was_stopped_goes_on_and_gives_the_same_draft(target, tmp_path, made):
    folder, stops = tmp_path / "bundle", []

    def interrupt_at(stage_wanted, at):
        def report(stage, done, total):
            if stage.startswith(stage_wanted) and done == at:
                stops.append(stage)
                raise KeyboardInterrupt

        return report

    with pytest.raises(KeyboardInterrupt):
        draft.make(str(target), folder, options(), interrupt_at("the target writes", 16 * 64))
    state = json.loads((tmp_path / "bundle.training" / "corpus.json").read_text())
    assert state["done"] == 16
    with pytest.raises(KeyboardInterrupt):
        draft.make(str(target), folder, options(), interrupt_at("training", 3))
    assert len(stops) == 2 and not folder.exists()
    told = []
    result = draft.make(str(target), folder, options(), lambda *stage: told.append(stage))
    assert not any(stage == "the target writes" for stage, *_ in told)  # what was written is not written again
    assert result.agreement == made[0].agreement


def test_weights_that_spoil_a_draft_are_refused_and_the_training_stays(target, tmp_path, monkeypatch):
    strict = dict.fromkeys(parity.LIMITS, parity.Limits(0.0, 0.0, 1.0))
    monkeypatch.setattr(parity, "LIMITS", strict)
    folder = tmp_path / "draft"
    with pytest.raises(UserError, match="With fp32 weights .* The training is: repeat the command with --weights"):
        draft.make(str(target), folder, options(passes=0.1))
    assert [p.name for p in tmp_path.iterdir()] == ["draft.training"]
    monkeypatch.undo()
    told = []
    draft.make(str(target), folder, options(passes=0.1), lambda *stage: told.append(stage))
    assert not any(stage == "the target writes" for stage, *_ in told)
    assert [p.name for p in tmp_path.iterdir()] == ["draft"]


def test_training_resumes_from_its_last_state(target, tmp_path):
    teacher = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    corpus = draft_corpus.Corpus(tmp_path / "corpus", 32, 32)
    draft_corpus.write(corpus, teacher, None, [], range(200), 256, frozenset([257]), 0, lambda *_: None)
    laws = draft_train.Laws(corpus, np.arange(260), 260)
    weights = []
    for stopped_after in (None, 3):
        student = draft_student.cut(teacher, [0, 3], np.arange(260))
        folder = tmp_path / f"run-{stopped_after}"
        folder.mkdir()
        steps = []
        draft_train.train(student, laws, 2.0, folder, 0, lambda *step: steps.append(step), lambda: len(steps) == stopped_after)
        if stopped_after:
            student = draft_student.cut(teacher, [0, 3], np.arange(260))
            assert draft_train.train(student, laws, 2.0, folder, 0, lambda *step: steps.append(step))
        assert [step for step, *_ in steps] == list(range(1, 8))
        weights.append(student.state_dict())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], msg=name)


def test_conversations_follow_the_template():
    turns = draft_corpus.Turns.of(
        lambda messages: "".join(f"<{m['role'][0]}>{m['content']}." for m in messages), lambda text: list(text.encode())
    )
    assert [bytes(part).decode() for part in (turns.opening, turns.to_answer, turns.to_user)] == ["<u>", ".<a>", ".<u>"]
    writer = draft_corpus._Writer(turns, (), frozenset(b"."))
    said, sampled = "", iter(b"???hi.???good morning.???")
    while len(said) < 26:
        said += chr(writer.next(next(sampled, ord("x"))))
    assert said == "<u>hi.<a>good morning.<u>x"
    assert draft_corpus.Turns.of(lambda messages: "nothing of it", lambda text: [1]) is None


def test_bad_requests_are_refused(target, tmp_path):
    def refusal(**changes):
        with pytest.raises(UserError) as caught:
            draft.make(str(target), tmp_path / "bundle", options(**changes))
        return str(caught.value)

    assert "--layers must be between 1 and 3" in refusal(layers=4)
    assert "--tokens must be at least" in refusal(tokens=64)
    assert "cannot be read" in refusal(texts=(tmp_path / "missing.txt",), fresh=True)
    assert "other options" in refusal(layers=3)
    (tmp_path / "bundle").mkdir()
    assert "exists already" in refusal()
    (tmp_path / "taken.training").mkdir()
    (tmp_path / "taken.training" / "mine").write_text("x")
    with pytest.raises(UserError, match="in the way"):
        draft.make(str(target), tmp_path / "taken", options())
