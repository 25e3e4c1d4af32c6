"""Puzzles and the prompts made of them."""

import zlib

import numpy as np
import pytest
import tiny_bundle

from edgekv.errors import UserError
from edgekv.generation.template import ChatTemplate
from edgekv.quality import needle, text
from edgekv.quality.tasks import TASKS

SENTENCES = text.shipped().sentences()
PLAIN = needle.PromptMaker(tiny_bundle.byte_tokenizer(), None, SENTENCES)


def read(trial):
    return bytes(t for t in trial.tokens.tolist() if t < 256).decode()


@pytest.mark.parametrize("task", TASKS)
def test_puzzles_hold_their_answers_and_differ_by_seed(task):
    seen = set()
    for seed in range(50):
        puzzle = TASKS[task](np.random.default_rng(seed))
        assert puzzle == TASKS[task](np.random.default_rng(seed))
        assert len(set(puzzle.answers)) == len(puzzle.answers)
        assert all(any(answer in fact for fact in puzzle.facts) for answer in puzzle.answers)
        assert not any(answer in puzzle.question or answer in puzzle.lead_in for answer in puzzle.answers)
        assert puzzle.target is None or all(answer in puzzle.facts[puzzle.target] for answer in puzzle.answers)
        seen.add(puzzle.answers)
    assert len(seen) == 50


def test_chain_of_variables_leads_back_to_the_number():
    puzzle = TASKS["variable-tracking"](np.random.default_rng(3))
    number = puzzle.question.split("value ")[1].split(",")[0]
    held = {}
    for fact in puzzle.facts:
        name, value = fact.removeprefix("VAR ").removesuffix(".").split(" = ")
        held[name] = held[value.removeprefix("VAR ")] if value.startswith("VAR ") else value
    assert {name for name, value in held.items() if value == number} == set(puzzle.answers)


def test_the_shipped_text_gives_no_answer_away():
    prose = " ".join(SENTENCES)
    for task in TASKS:
        for seed in range(20):
            assert needle.score(prose, TASKS[task](np.random.default_rng(seed)).answers) == 0


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [700, 1500, 6000])
def test_prompts_fill_the_length_and_keep_every_fact(task, length):
    trial = PLAIN.make(task, length, 0.5, seed=1)
    content = read(trial)
    puzzle = TASKS[task](np.random.default_rng([1, length, zlib.crc32(task.encode())]))
    assert all(content.count(fact) == 1 for fact in puzzle.facts)
    assert content.endswith(f"{puzzle.question}\n{puzzle.lead_in}")
    assert trial.tokens.size <= length
    if length > 1000:
        assert trial.tokens.size > length - 600  # the longest sentence of the text has over 500 letters


def test_depth_is_where_the_fact_lies_and_all_else_stays():
    rest = []
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        trial = PLAIN.make("passkey", 8000, depth, seed=4)
        content = read(trial)
        [fact] = [f for f in TASKS["passkey"](np.random.default_rng([4, 8000, zlib.crc32(b"passkey")])).facts]
        first, last = content.index("\n\n"), content.rindex("\n\n")
        assert (content.index(fact) - first) / (last - first) == pytest.approx(depth, abs=0.06)
        rest.append("".join(content.split(fact)).replace(" ", ""))
        assert trial.depth == depth
    assert len(set(rest)) == 1


def test_spread_tasks_have_no_depth():
    assert PLAIN.make("multi-value", 3000, None, seed=0).depth is None
    assert {depth for _, _, depth, _ in needle.grid(["multi-value"], [3000], 3, 1, 0)} == {None}
    cells = list(needle.grid(["passkey", "multi-value"], [1000, 3000], 3, 2, 7))
    assert sum(task == "passkey" for task, *_ in cells) == sum(task == "multi-value" for task, *_ in cells) == 12
    assert {depth for task, _, depth, _ in cells if task == "passkey"} == {1 / 6, 0.5, 5 / 6}


def test_a_short_text_starts_over():
    maker = needle.PromptMaker(tiny_bundle.byte_tokenizer(), None, SENTENCES[:3])
    assert maker.make("passkey", 5000, 0.5, 0).tokens.size > 4000


def test_chat_templates_wrap_the_prompt():
    template = ChatTemplate("<user>{{ messages[0].content }}{% if add_generation_prompt %}<bot>{% endif %}")
    trial = needle.PromptMaker(tiny_bundle.byte_tokenizer(), template, SENTENCES).make("passkey", 1500, 0.5, 0)
    assert trial.tokens[0] == tiny_bundle.USER and trial.tokens[-1] == tiny_bundle.BOT
    assert "The secret code is" not in read(trial)[-40:]


def test_no_room():
    with pytest.raises(UserError, match="no room"):
        PLAIN.make("multi-key", 300, 0.5, 0)


@pytest.mark.parametrize(
    "said, expected",
    [("it is 48213.", 1.0), ("48213", 1.0), ("148213", 0.0), ("482130", 0.0), ("4821", 0.0), ("", 0.0), ("the code:48213!", 1.0)],
)
def test_score_wants_whole_numbers(said, expected):
    assert needle.score(said, ["48213"]) == expected


def test_score_of_several_answers_is_a_share():
    assert needle.score("ABC and XYZ", ["ABC", "XYZ", "PQR"]) == pytest.approx(2 / 3)


def test_running_a_prompt_generates_and_scores(tmp_path, session_of):
    bundle = tiny_bundle.make(tmp_path / "b", attention=0.0, follows=tiny_bundle.follow("is 48213.", then=ord("!")))
    session, tokenizer = session_of(bundle), tiny_bundle.byte_tokenizer()
    tokens = np.array([*b"whatever", tiny_bundle.BOT])
    for answers, score in ((("48213",), 1.0), (("48214",), 0.0), (("48213", "99999"), 0.5)):
        outcome = needle.run(session, tokenizer, needle.Trial("passkey", 64, 0.5, tokens, answers), [tiny_bundle.EOS])
        assert outcome.score == score
        assert outcome.text.startswith("is 48213")


def test_a_right_answer_ends_the_run(tmp_path, session_of):
    bundle = tiny_bundle.make(tmp_path / "b", attention=0.0, follows=tiny_bundle.follow("48213.", then=ord(".")))
    trial = needle.Trial("passkey", 64, 0.5, np.array([tiny_bundle.BOT]), ("48213",))
    assert needle.run(session_of(bundle), tiny_bundle.byte_tokenizer(), trial, []).text == "48213."


def test_summary_has_a_cell_per_length_and_depth():
    def outcome(length, depth, score):
        return needle.Outcome(needle.Trial("passkey", length, depth, np.zeros(1), ("1",)), "", score)

    found = needle.summarise([outcome(10, 0.0, 1.0), outcome(10, 0.0, 0.0), outcome(10, 1.0, 1.0), outcome(20, 0.0, 0.0)])
    assert found["passkey"]["score"] == 0.5 and found["passkey"]["trials"] == 4
    assert found["passkey"]["cells"][0] == {"length": 10, "depth": 0.0, "score": 0.5, "trials": 2}


def test_sentences_of_a_text():
    prose = text.Text("t", 'Chapter 1\n\nIt was a dark night, they\nsaid.  "Come in at once!"  No.  He did as he was told')
    assert prose.sentences() == ["Chapter 1 It was a dark night, they said.", '"Come in at once!"']
    assert len(SENTENCES) > 400 and all(s == " ".join(s.split()) for s in SENTENCES)
