"""How long a draft should be: fixed, or chosen from measured acceptance and measured step times.

With a value of time of `rate` tokens per second (what decoding achieves at present, never less than plain decoding), drafting
further is worth it while the tokens expected from it exceed rate x the seconds it costs. That is the rule that maximises tokens
per second in the long run (Dinkelbach's method for ratios). Expected tokens come from the acceptance measured for each grade of
certainty that the drafter tells, so drafts are long where the text is easy and short where it is not, and speculation is off where
it does not pay. While it is off, single rounds are tried again as often as a small budget allows, more and more rarely while they
come to nothing; a round that turns out to pay uses up none of it, so speculation comes back as fast as the text gets easier. Until
the budget has grown by what the next trial lacks there is nothing to decide, and decoding is plain (`rest`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from edgekv.generation.costs import Duration, Pace, StepCosts
from edgekv.generation.drafters import Drafter

MAX_GAMMA = 16  # most tokens of one draft
_PRIOR_WEIGHT = 3.0  # tokens that a drafter's own guess of acceptance counts for
_FORGET = 0.985  # weight of older samples of a grade, per sample
_TREND, _TREND_WEIGHT = 0.97, 4.0  # weight of older tokens in the trend of acceptance, and of no trend
_MOST = 0.99  # acceptance that is never exceeded
_EXPECT = 0.1  # share of a new observation in what is expected of places not looked at yet
_LOOK_AHEAD = 4  # places that are considered beyond the next decision
_FREE = 0.01  # laws that cost less than so many tokens are always computed
_LEAST_GAIN = 0.01  # tokens below which a gain is not worth the risk that a measured time is a little wrong
_PLAIN_FIRST = 2  # plain steps before the first draft
_HORIZON = 256.0  # tokens over which the achieved rate is averaged
_FEW = 8  # samples of a law's time below which it may be an accident
_TRIAL_BUDGET = 0.01  # tokens that trials may lose, per token generated
_PATIENCE = 2  # trials in a row that may come to nothing before the budget shrinks
_DISCOURAGED, _MOST_DISCOURAGED = 0.5, 4.0  # what each further one adds to the divisor of the budget, which is 1 before, and its most
_TRIAL_START = 2.8  # tokens that they may lose at the start
_FIRST_TRIAL = 1.8  # most that one of the first uses up, before the cost of a law is known: it takes longer than any other, because everything is new
_ALL_RIGHT = 0.5  # share that counts of what a trial lost whose guesses were right, nothing while its time may have been a slow moment's: a useless draft has none
_TRIAL_MOST = 16.0  # tokens that may be saved up for trials
_TRIALS_SAVED = 1.5  # the same, as a multiple of the dearest law
_TELLING = 0.1  # of a plain step, above which a time tells the pace of the machine
_GROWTH = 2  # times the longest draft so far that a draft may have
_LONG = 4  # tokens to read from which on it tells what reading one costs
_LONGEST_REST = 8  # plain steps in a row without a decision: the rate that decides changes meanwhile
_READING = 0.25  # cost of a token that has to be read, of a law's, that is assumed until it was measured


class FixedLength:
    """`gamma` tokens in every round, as far as the boundary and the drafter allow."""

    def __init__(self, gamma: int):
        self.gamma = gamma
        self._left = 0

    def rest(self) -> int:
        return 0

    def rested(self, seconds: Sequence[float]) -> None:
        pass

    def start(self, room: int) -> None:
        self._left = min(self.gamma, room)

    def wants_law(self, behind: int = 0) -> bool:
        return self._left > 0

    def wants_token(self, grade: int) -> bool:
        self._left -= 1
        return True

    def finish(self, grades: Sequence[int], accepted: int, seconds: float) -> None:
        pass


class AdaptiveLength:
    """Chooses the length of every round; `Length` of edgekv.generation.drafters, with a start and a finish around it.

    drafter  its grades and what it expects of them
    most     longest draft
    clock    seconds, monotonic
    """

    def __init__(self, drafter: Drafter, most: int = MAX_GAMMA, clock: Callable[[], float] = time.perf_counter):
        self.most = most
        self.steps = StepCosts(most + 1)
        self.first_law, self.next_law = Duration(), Duration()
        self.reading = Duration()  # of a token that a drafter has to catch up with
        self.pace = Pace()  # all times that are kept are those of the usual pace
        self._clock = clock
        priors = [drafter.prior(grade) for grade in range(drafter.grades)]
        # Tokens judged and accepted by grade, decayed; the drafter's own guess counts as if it were measured.
        self._tries, self._hits = [_PRIOR_WEIGHT] * drafter.grades, [_PRIOR_WEIGHT * prior for prior in priors]
        self._kept = self._promised = 0.0  # decayed: tokens accepted lately, and how many were expected to be
        self._first = sum(priors) / drafter.grades  # acceptance expected of a first place, before its grade is known
        # of the place behind an accepted one, by the grade of that one; None: none was seen, as at first places
        self._after: list[float | None] = [None] * drafter.grades
        self._tokens = self._seconds = 0.0  # decayed, for the rate
        self._allowance = _TRIAL_START  # tokens that trials may lose
        self._failed = 0  # trials in a row without an accepted token
        self._dearest = 0.0  # largest cost of a law so far
        self._longest = 0  # tokens of the longest draft so far
        self._guess = 0.0  # of a first law, as long as there was none without reading
        self._rest = 0  # plain steps that the next trial is away, at least
        self.start(0)

    # ---- what is known

    def acceptance(self, grade: int) -> float:
        """Share of drafted tokens of this grade that are accepted, given that all before them were."""
        # a text that gets easier or harder does so for all grades at once
        trend = (self._kept + _TREND_WEIGHT) / (self._promised + _TREND_WEIGHT)
        return min(self._usual(grade) * trend, _MOST)

    def _usual(self, grade: int) -> float:
        return self._hits[grade] / self._tries[grade]

    @property
    def plain_rate(self) -> float:
        """Tokens per second without drafts at the usual pace, 0 while unknown."""
        seconds = self.steps.seconds[1]
        return 1.0 / seconds if seconds > 0 else 0.0

    @property
    def rate(self) -> float:
        """Tokens per second that decoding achieves, at the usual pace."""
        achieved = self._tokens / self._seconds if self._seconds > 0 else 0.0
        return max(achieved, self.plain_rate)

    # ---- rounds without a decision

    def rest(self) -> int:
        """Plain steps that can be made before a round is worth starting; `rested` is told of them."""
        return self._rest

    def rested(self, seconds: Sequence[float]) -> None:
        """They were made, and took so long each: one slow moment is one sample, as in a round."""
        self._rest = 0
        for step in seconds:
            self._time(1, step)
            self._achieve(1, step / self.pace.factor)
            self._allow(self._budget)

    # ---- one round

    def start(self, room: int) -> None:
        """Begins a round of at most `room` drafted tokens."""
        # the first steps of all measure plain decoding, against which everything is judged
        self._room = min(room, self.most) if self.steps.samples(1) >= _PLAIN_FIRST else 0
        self._unknown = self.first_law.samples == 0
        # What a law costs is not known before the first, and what many rows cost lies on a line that few rows told: a step at a time.
        self._room = min(self._room, max(_GROWTH * self._longest, 1))
        self._count = self._grade = 0
        self._reach = 1.0  # probability that all tokens drafted so far are accepted
        self._law_started = self._law_seconds = 0.0
        self._behind = 0  # tokens to read before the first law
        self._trial = self._unknown
        self._looked = False  # whether a law was computed

    def wants_law(self, behind: int = 0) -> bool:
        if self._count >= self._room:
            return False
        self._behind = 0 if self._count else behind
        cost = self._law_cost()
        self._dearest = max(self._dearest, cost)
        # A first law that read the prompt, when everything was new, tells little; one that reads nothing tells what the next ones will cost.
        tells = self._unknown and self._guess > 0 and self._behind == 0 and self._kept > 0
        if tells or cost * self.rate < _FREE or self._pays(gain := self._gain(None, cost)):
            self._law_started = self._clock()
            return True
        if self._count == 0:
            self._rest = min(int((-gain - self._allowance) / self._budget), _LONGEST_REST)
        return False

    def wants_token(self, grade: int) -> bool:
        self._law_done()
        acceptance, last = self.acceptance(grade), self._grade
        if self._count == 0:
            self._first += _EXPECT * (acceptance - self._first)
        else:
            expected = self._behind_one(last)
            self._after[last] = expected + _EXPECT * (acceptance - expected)
        self._grade = grade
        if not self._pays(self._gain(acceptance)):
            return False
        self._count += 1
        self._reach *= acceptance
        return True

    def finish(self, grades: Sequence[int], accepted: int, seconds: float) -> None:
        """Ends the round: grades of the drafted tokens, how many were accepted, and the time of everything in the round."""
        for place, grade in enumerate(grades[: accepted + 1]):
            hit = float(place < accepted)
            self._kept = self._kept * _TREND + hit
            self._promised = self._promised * _TREND + self._usual(grade)
            self._tries[grade] = self._tries[grade] * _FORGET + 1.0
            self._hits[grade] = self._hits[grade] * _FORGET + hit
        rows = 1 + len(grades)
        self._time(rows, seconds - self._law_seconds)
        self._longest = max(self._longest, len(grades))
        seconds /= self.pace.factor
        emitted = accepted + 1
        self._achieve(emitted, seconds)
        loss = max(0.0, (seconds - self.steps.seconds[1]) * self.plain_rate - accepted) if self._trial else 0.0
        if self._unknown:
            loss = min(loss, _FIRST_TRIAL)
        if grades and accepted == len(grades):
            loss *= _ALL_RIGHT if self.steps.usual(rows) else 0.0
        if accepted:
            self._failed = 0
        elif self._trial and self._looked:
            self._failed += 1
        self._allow(self._budget * emitted - loss)

    # ---- parts

    def _time(self, rows: int, seconds: float) -> None:
        """Learns from the time of a step of so many rows."""
        if (usual := self.steps.usual(rows)) is not None:
            self.pace.note(seconds, usual)
        self.pace.observe(_TELLING * self.steps.seconds[1])
        self.steps.record(rows, seconds / self.pace.factor)

    @property
    def _budget(self) -> float:
        """Tokens that trials may lose, per token generated."""
        return _TRIAL_BUDGET / min(1.0 + _DISCOURAGED * max(self._failed - _PATIENCE, 0), _MOST_DISCOURAGED)

    def _achieve(self, tokens: int, seconds: float) -> None:
        decay = 0.5 ** (tokens / _HORIZON)
        self._tokens = self._tokens * decay + tokens
        self._seconds = self._seconds * decay + seconds

    def _allow(self, tokens: float) -> None:
        # as much as a trial costs must be possible to save up, or speculation would never come back
        most = max(_TRIAL_MOST, _TRIALS_SAVED * self.plain_rate * self._dearest)
        self._allowance = min(self._allowance + tokens, most)

    def _behind_one(self, grade: int) -> float:
        """Acceptance expected behind an accepted token of this grade."""
        after = self._after[grade]
        return self._first if after is None else after

    def _law_done(self) -> None:
        self._looked = True
        seconds, law = self._clock() - self._law_started, self.next_law if self._count else self.first_law
        self._law_seconds += seconds
        if self._behind:  # the pace cannot be told from it: how long reading takes depends on the size of its blocks
            self._guess = seconds / self.pace.factor / (1.0 + _READING * self._behind)
            if law.samples and self._behind >= _LONG:  # a few tokens more cost a lot each, and many of them little
                self.reading.record(max(seconds / self.pace.factor - law.seconds, 0.0) / self._behind)
        else:
            if law.known:
                self.pace.note(seconds, law.seconds)
            law.record(seconds / self.pace.factor)

    def _next_law(self) -> float:
        """Seconds of a law behind a drafted token: it reads that one, and a first law reads one at least.

        So one slow sample cannot end long drafts for good: they are what would bring the next samples.
        """
        if self.next_law.samples == 0:
            return self.first_law.seconds
        known = self.next_law.samples >= _FEW
        return self.next_law.seconds if known else min(self.next_law.seconds, self.first_law.seconds)

    def _law_cost(self) -> float:
        """Seconds of the law that would be next."""
        if self._count:
            return self._next_law()
        law = self.first_law.seconds if self.first_law.samples else self._guess
        if self._guess > 0 and not self.first_law.known:  # one slow sample cannot end all drafts for long
            law = min(law, self._guess)
        each = self.reading.seconds if self.reading.samples else _READING * law
        return law + self._behind * each

    def _gain(self, acceptance: float | None, cost: float = 0.0) -> float:
        """Largest expected gain, in tokens, of drafting one or more further tokens.

        acceptance  of the next one when its law is known; None: it still has to be paid for, `cost` seconds
        """
        rate, steps, count = self.rate, self.steps.seconds, self._count
        law = rate * self._next_law()
        spent = rate * cost
        after = self._behind_one(self._grade) if count or acceptance is not None else self._first
        reach, gained, best = self._reach, 0.0, -float("inf")
        for place in range(count, min(count + _LOOK_AHEAD, self._room)):
            reach *= after if acceptance is None or place > count else acceptance
            gained += reach
            best = max(best, gained - spent - rate * (steps[place + 2] - steps[count + 1]))
            spent += law
        return best

    def _pays(self, gain: float) -> bool:
        """Whether to draft on: because a gain is expected, or as a trial whose expected loss the allowance covers."""
        if gain > _LEAST_GAIN:
            return True
        if self._count == 0 and -gain < self._allowance:
            self._trial = True
            return True
        return False
