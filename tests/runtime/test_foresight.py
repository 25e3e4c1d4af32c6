"""What the end of a prompt and its answer attend to stays in a bounded cache: queries of later tokens at earlier boundaries."""

import numpy as np
import pytest
import tiny_bundle
from oracle import OracleModel

from edgekv import engine, layout
from edgekv.errors import NativeError
from edgekv.generation.session import Session

TEXT = np.random.default_rng(11).integers(0, 256, 300)
OBSERVE = 16  # of tiny_bundle's heavy caches


@pytest.fixture
def heavy(tmp_path):
    def make(name="b", **options):
        return tiny_bundle.make(tmp_path / name, "heavy", **{"kept": 48, "boundary": 32, "positions": "original", **options})

    return make


def kept(session):
    """Positions in the body of the first layer, [kv_heads, slots]."""
    params = session.engine.bundle.layers[0]["params"]
    return layout.StateView(params, session.engine._states[0]).body_pos.copy()


class Foreseeing(OracleModel):
    """The oracle, which before each boundary that evicts reads the end of the prompt and answers it, forgets both, and scores with
    the queries of both."""

    def read_prompt(self, tokens):
        held = None
        for i, token in enumerate(tokens):
            boundary = self.base + self.bundle.boundary
            if i == boundary - OBSERVE and boundary > self.rank_limit and len(tokens) > boundary:
                held = self._queries_after(tokens[-OBSERVE // 2 :])
            if held is not None and i == boundary - 1:
                self._hold(held)
            logits = self.feed(int(token))
        return logits

    def _queries_after(self, question):
        place, base, self.base = self.position, self.base, -(10**9)  # no compaction
        for token in question:
            logits = self.feed(int(token))
        for _ in range(OBSERVE - len(question)):
            logits = self.feed(int(logits.argmax()))
        self.position, self.base = place, base
        return [cache.state.tail_q.copy() for cache in self.caches]

    def _hold(self, held):
        """The last token before the boundary: its step stores queries, and compaction follows at once."""
        for cache, queries in zip(self.caches, held, strict=True):
            compact = type(cache).compact

            def with_held(position, rank_base=None, cache=cache, queries=queries, compact=compact):
                cache.state.tail_q[:] = queries
                compact(cache, position, rank_base)
                del cache.compact

            cache.compact = with_held


@pytest.mark.parametrize("positions", ["original", "cache"])
def test_equals_the_oracle(heavy, positions):
    made = heavy(positions=positions, element="fp32")
    session, oracle = Session(engine.load(made)), Foreseeing(made)
    want = oracle.read_prompt(TEXT)
    got = session.feed(TEXT, foresee=True)
    np.testing.assert_allclose(got, want, atol=2e-3)
    np.testing.assert_array_equal(kept(session), oracle.caches[0].state.body_pos)


def test_blocks_do_not_matter(heavy):
    states = []
    for chunk in (5, 16, 32):
        session = Session(engine.load(heavy(f"b{chunk}", chunk=chunk)))
        session.feed(TEXT, foresee=True)
        states.append(kept(session))
        last = session.engine.step(np.array([7]), TEXT.size, np.array([0])).copy()
        states.append(last)
    np.testing.assert_array_equal(states[0], states[2])
    np.testing.assert_array_equal(states[0], states[4])
    np.testing.assert_array_equal(states[1], states[3])


def test_the_end_decides_what_is_kept_and_only_when_asked_to(heavy):
    """Two prompts that differ after their last inner boundary, 256."""
    made, found = heavy(), {}
    for foresee in (False, True):
        for end in (20, 120):
            session = Session(engine.load(made))
            session.feed(np.concatenate([TEXT[:258], TEXT[end : end + 20]]), foresee=foresee)
            found[foresee, end] = kept(session)
    assert np.array_equal(found[False, 20], found[False, 120])
    assert not np.array_equal(found[True, 20], found[True, 120])


def test_nothing_changes_where_nothing_is_dropped(heavy):
    made = heavy(kept=320)
    plain, foreseeing = (Session(engine.load(made)) for _ in range(2))
    plain.feed(TEXT)
    foreseeing.feed(TEXT, foresee=True)
    assert plain.engine.state_hash(TEXT.size) == foreseeing.engine.state_hash(TEXT.size)


def test_nothing_is_committed_by_looking_ahead(heavy):
    """What stood in the tail before stays, and the boundary, once reached, is that of the same text."""
    session = Session(engine.load(heavy()))
    session.feed(TEXT[: 64 + 16])
    before = session.engine.state_hash(80)
    session._look_ahead(TEXT)
    assert session.engine.state_hash(80) == before and session.position == 80
    assert session.tokens.tolist() == TEXT[:80].tolist()


def test_an_empty_text_holds_no_queries(heavy):
    made = heavy()
    plain, foreseeing = (Session(engine.load(made)) for _ in range(2))
    foreseeing.feed(TEXT[:80])
    foreseeing._look_ahead(TEXT)
    foreseeing.reset()
    for session in (plain, foreseeing):
        session.feed(TEXT[:200])
    assert plain.engine.state_hash(200) == foreseeing.engine.state_hash(200)


def test_a_window_cache_has_nothing_to_decide(tmp_path):
    made = tiny_bundle.make(tmp_path / "w", "window", kept=48)
    plain, foreseeing = (Session(engine.load(made)) for _ in range(2))
    plain.feed(TEXT)
    foreseeing.feed(TEXT, foresee=True)
    assert foreseeing.engine.observe == 0
    assert plain.engine.state_hash(TEXT.size) == foreseeing.engine.state_hash(TEXT.size)


def test_short_prompts_after_a_long_text(heavy):
    """A turn of fewer tokens than are observed crosses a boundary without looking ahead."""
    plain, foreseeing = (Session(engine.load(heavy(f"b{i}"))) for i in range(2))
    for session, foresee in ((plain, False), (foreseeing, True)):
        session.feed(TEXT[:250])
        session.feed(TEXT[250:260], foresee=foresee)
    assert plain.engine.state_hash(260) == foreseeing.engine.state_hash(260)


def test_only_where_queries_choose(tmp_path):
    session = Session(engine.load(tiny_bundle.make(tmp_path / "w", "window", kept=48)))
    with pytest.raises(NativeError, match="no queries"):
        session.engine.hold_queries()
