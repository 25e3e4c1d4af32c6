"""Generating and conversing: why an answer ends, what is fed again, and that no limit ends a conversation."""

import pytest
import tiny_bundle
from tiny_bundle import BOT, EOS, follow

from edgekv import engine
from edgekv.errors import UserError
from edgekv.generation.conversation import Conversation
from edgekv.generation.generate import Answer, generate
from edgekv.generation.report import Report
from edgekv.generation.sampling import Sampler, SamplingOptions
from edgekv.generation.session import Session
from edgekv.generation.template import ChatTemplate
from edgekv.generation.text import load_tokenizer


class Talker:
    """A session over a tiny bundle, with everything around it."""

    def __init__(self, folder, template=tiny_bundle.TEMPLATE, options=None, **bundle):
        self.bundle = tiny_bundle.make(folder, **bundle)
        self.session = Session(engine.load(self.bundle))
        self.sampler = Sampler(options or SamplingOptions(), self.bundle.model["vocab"], seed=0)
        self.tokenizer = load_tokenizer(self.bundle)
        self.template = ChatTemplate(template, bos_token="<bos>", eos_token="<eos>")
        self.talk = Conversation(self.session, self.sampler, self.tokenizer, self.template)

    def complete(self, prompt, **options):
        answer = Answer()
        options = {"max_tokens": 50, "end_tokens": [EOS]} | options
        pieces = list(generate(self.session, self.sampler, self.tokenizer, self.tokenizer.encode(prompt).ids, answer, **options))
        assert "".join(pieces) == answer.text
        return answer

    def ask(self, message, **options):
        answer = Answer()
        pieces = list(self.talk.ask(message, answer, **({"max_tokens": 50, "end_tokens": [EOS]} | options)))
        assert "".join(pieces) == answer.text
        return answer


def says(folder, text, **more):
    """A model that answers `text` (no byte twice) to every message."""
    return Talker(folder, attention=0.0, follows=follow(text), **more)


# ------------------------------------------------------------------------------------------------------------ one answer


def test_ends_with_the_model(tmp_path):
    answer = says(tmp_path / "b", "Hi né!").complete("<bot>")
    assert (answer.text, answer.finish_reason, answer.exact) == ("Hi né!", "eos", True)
    assert answer.tokens == list("Hi né!".encode()) and answer.prompt_tokens == answer.fed == 1


def test_ends_at_the_wanted_length_and_inside_a_character(tmp_path):
    talker = says(tmp_path / "b", "ab€")
    answer = talker.complete("<bot>", max_tokens=4)
    assert (answer.text, answer.finish_reason, answer.exact, len(answer.tokens)) == ("ab", "length", False, 4)
    assert talker.complete("<bot>", max_tokens=0).text == ""


def test_ends_at_a_stop_string_across_tokens(tmp_path):
    answer = says(tmp_path / "b", "ab ENDxyz").complete("<bot>", stop_strings=["xx", "END"])
    assert (answer.text, answer.finish_reason, answer.stop_string) == ("ab ", "stop", "END")


def test_what_was_held_for_a_stop_string_is_shown_at_the_end(tmp_path):
    answer = says(tmp_path / "b", "one EN").complete("<bot>", stop_strings=["END"])
    assert (answer.text, answer.finish_reason) == ("one EN", "eos")


def test_goes_on_when_the_end_is_ignored(tmp_path):
    answer = says(tmp_path / "b", "ab").complete("<bot>", end_tokens=[], max_tokens=6)
    assert answer.tokens[:3] == [*b"ab", EOS] and answer.finish_reason == "length"


def test_a_full_cache_ends_the_answer_with_its_own_reason(tmp_path):
    talker = Talker(tmp_path / "b", keep="full", kept=64, boundary=32)
    answer = talker.complete("x" * 90, max_tokens=1000, end_tokens=[])
    assert answer.finish_reason == "capacity" and len(answer.tokens) == 7  # 6 fit, the 7th needs no place
    assert Report.of(talker.session, [answer]).tokens_kept == 96
    with pytest.raises(UserError, match="has 96 tokens|has 97 tokens"):
        talker.complete("x")
    talker.session.reset()
    with pytest.raises(UserError, match="The text has 97 tokens and this bundle ends at 96; .*--kv-budget"):
        talker.complete("x" * 97)
    assert talker.session.position == 0


def test_interrupts_between_blocks_and_tokens_leave_a_session_that_goes_on(tmp_path):
    talker, asked = Talker(tmp_path / "b"), iter([False, False, True])
    answer = talker.complete("x" * 100, interrupted=lambda: next(asked))
    assert (answer.finish_reason, answer.fed, answer.tokens) == ("interrupted", 64, [])
    asked = iter([False] * 10 + [True])
    answer = talker.complete("x" * 20, interrupted=lambda: next(asked), end_tokens=[])
    assert answer.finish_reason == "interrupted" and 0 < len(answer.tokens) < 10
    assert list(talker.session.tokens) == [ord("x")] * 84 + answer.tokens[:-1]


def test_seeded_sampling_repeats_itself_over_another_session(tmp_path):
    options = SamplingOptions(1.0, top_k=20, repetition_penalty=1.2)
    answers = [Talker(tmp_path / f"{i}", options=options).complete("abc", end_tokens=[]) for i in range(2)]
    assert answers[0].tokens == answers[1].tokens and len(set(answers[0].tokens)) > 5


def test_report_adds_up(tmp_path):
    talker = Talker(tmp_path / "b", kept=48, boundary=32)
    answers = [talker.complete("x" * 100, end_tokens=[]), talker.complete("y" * 10, end_tokens=[])]
    report = Report.of(talker.session, answers)
    assert (report.prompt_tokens, report.generated_tokens) == (110, 100)
    assert report.position == 110 + 100 - 2 and report.tokens_kept + report.tokens_evicted == report.position
    assert report.kv_bytes_allocated == talker.bundle.arena_bytes > report.kv_bytes_used > 0
    assert report.decode_tokens_per_second == pytest.approx(100 / report.decode_seconds)
    assert 0 < report.compaction_seconds < report.prefill_seconds + report.decode_seconds
    assert all("None" not in line for line in report.lines("length"))


# ---------------------------------------------------------------------------------------------------------- conversations


def test_only_the_new_end_of_a_conversation_is_fed(tmp_path):
    talker = says(tmp_path / "b", "fine")
    first, second = talker.ask("How are you?"), talker.ask("And now?")
    assert first.text == second.text == "fine" and first.finish_reason == "eos"
    assert first.fed == first.prompt_tokens == len("How are you?") + 3
    assert second.prompt_tokens == first.prompt_tokens + len("fine") + 1 + 1 + len("And now?") + 1
    assert second.fed == second.prompt_tokens - first.prompt_tokens - len("fine")  # 'fine' is in the cache, <eos> is not
    text = "<bos><user>How are you?<bot>fine<eos><user>And now?<bot>fine"
    assert list(talker.session.tokens) == talker.tokenizer.encode(text, add_special_tokens=False).ids


def test_continuing_gives_what_reading_everything_again_gives(tmp_path):
    """The same three turns, continued in the cache, and each in a fresh session fed with the whole conversation."""
    talker = Talker(tmp_path / "b", keep="full", kept=512, boundary=32)
    for turn in range(3):
        answer = talker.ask(f"question {turn}?", end_tokens=[], max_tokens=20)
        fresh = Talker(tmp_path / f"fresh{turn}", keep="full", kept=512, boundary=32)
        tokens = list(talker.session.tokens)[: answer.prompt_tokens]
        again = Answer()
        list(generate(fresh.session, fresh.sampler, fresh.tokenizer, tokens, again, max_tokens=20))
        assert again.tokens == answer.tokens and len(answer.tokens) == 20
        assert turn == 0 or answer.fed < 20


TRIMMING = tiny_bundle.TEMPLATE.replace("m.content", "m.content | trim")


def test_a_template_that_changes_the_answer_rewinds_the_tail(tmp_path):
    talker = Talker(tmp_path / "b", attention=0.0, follows=follow("ok "), template=TRIMMING)
    talker.ask("a")
    answer = talker.ask("b")
    assert answer.fed == len("<eos>") - 4 + len("<b?")  # from behind 'ok' on: <eos> <user> b <bot>
    text = "<bos><user>a<bot>ok<eos><user>b<bot>ok "
    assert list(talker.session.tokens) == talker.tokenizer.encode(text, add_special_tokens=False).ids


def test_a_template_that_changes_the_past_starts_over(tmp_path):
    newest_only = "{{ bos_token }}{{ messages | length }}<user>{{ messages[-1].content }}<bot>"
    talker = Talker(tmp_path / "b", attention=0.0, follows=follow("ok"), template=newest_only, kept=16, boundary=16, sinks=0)
    talker.ask("a" * 40)
    answer = talker.ask("b" * 40)
    assert answer.fed == answer.prompt_tokens == 44 and talker.session.position == 44 + 2
    assert talker.session.engine.occupancy(46).evicted == 16


def test_stop_strings_and_cut_characters_do_not_confuse_the_next_turn(tmp_path):
    talker = says(tmp_path / "b", "ab ENDxyz")
    assert talker.ask("a", stop_strings=["END"]).text == "ab "
    second = talker.ask("b")
    text = "<bos><user>a<bot>ab <eos><user>b<bot>ab ENDxyz"
    assert list(talker.session.tokens) == talker.tokenizer.encode(text, add_special_tokens=False).ids
    assert second.text == "ab ENDxyz" and second.fed < second.prompt_tokens


def test_interrupted_answers_stay_in_the_conversation(tmp_path):
    talker = says(tmp_path / "b", "abcdefgh")
    asked = iter([False] * 5 + [True] * 10)
    first = talker.ask("x", interrupted=lambda: next(asked))
    assert first.finish_reason == "interrupted" and 0 < len(first.text) < 8
    talker.ask("y")
    text = f"<bos><user>x<bot>{first.text}<eos><user>y<bot>abcdefgh"
    assert list(talker.session.tokens) == talker.tokenizer.encode(text, add_special_tokens=False).ids


def test_a_prompt_interrupted_while_it_is_read(tmp_path):
    talker, asked = says(tmp_path / "b", "ok"), iter([False, True])
    first = talker.ask("x" * 100, interrupted=lambda: next(asked))
    assert (first.finish_reason, first.text, talker.session.position) == ("interrupted", "", 32)
    second = talker.ask("y")
    assert second.text == "ok" and second.fed == second.prompt_tokens - 32


@pytest.mark.parametrize("keep, positions", [("window", "cache"), ("heavy", "cache")])
def test_pain_22_a_streaming_conversation_never_dies(tmp_path, keep, positions):
    """Thirty turns of long messages, many times the cache and past the model's context: every one is answered, memory is flat."""
    talker = Talker(tmp_path / "b", keep=keep, positions=positions, kept=48, boundary=32, context=128)
    address, sizes = talker.session.engine.arena.ctypes.data, set()
    for turn in range(30):
        answer = talker.ask("long story " * 12, end_tokens=[], max_tokens=40)
        assert answer.finish_reason == "length" and len(answer.tokens) == 40
        assert turn == 0 or answer.fed < answer.prompt_tokens  # continued, not read again
        sizes.add(talker.session.engine.occupancy(talker.session.position).allocated)
    assert talker.session.position > 4000 > 128 and talker.talk.forgotten == 0
    assert len(sizes) == 1 and talker.session.engine.arena.ctypes.data == address


@pytest.mark.parametrize("keep, positions", [("full", "original"), ("window", "original"), ("heavy", "original")])
def test_pain_22_a_conversation_with_an_end_forgets_its_oldest_messages(tmp_path, keep, positions):
    """Caches that end (full) and positions that end (original): the answer says `capacity`, and the next message is answered."""
    talker = Talker(tmp_path / "b", keep=keep, positions=positions, kept=96, boundary=32, context=128)
    assert talker.session.engine.capacity == 128
    reasons = []
    for _ in range(12):
        answer = talker.ask("a message", end_tokens=[], max_tokens=40)
        assert answer.tokens
        reasons.append(answer.finish_reason)
    assert set(reasons) == {"length", "capacity"} and talker.talk.forgotten > 0
    with pytest.raises(UserError, match="The message makes the conversation .* ends at 128"):
        talker.ask("x" * 200)
    assert talker.ask("still there?", end_tokens=[]).tokens


def test_a_new_conversation_keeps_the_system_message(tmp_path):
    talker = says(tmp_path / "b", "ok")
    talker.talk.messages.append({"role": "system", "content": "S"})
    talker.ask("a")
    talker.talk.clear()
    assert talker.talk.messages == [{"role": "system", "content": "S"}] and talker.session.position == 0
    assert talker.ask("b").text == "ok"
    assert list(talker.session.tokens)[-3:] == [BOT, *b"ok"]
