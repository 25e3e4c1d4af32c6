"""Drafts that a real pair of models made, replayed with a virtual clock, to judge length controllers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from edgekv.generation.drafters import logits

# Seconds, as measured on two cores of a Xeon: a step of the target by its number of rows, a draft step that reads one or two tokens,
# and each token more that it reads. From 10 rows on a line.
ROWS = [0.0, 0.077, 0.086, 0.094, 0.115, 0.130, 0.159, 0.187, 0.213, 0.225]
LAW, TWO, TOKEN = 0.0195, 0.0222, 0.0047
NEWEST = 26  # tokens that the draft reads at most


class Recorded:
    """Answers as lists of (grades of the places ahead, how many of them come true)."""

    grades = logits.GRADES

    def __init__(self) -> None:
        lines = Path(__file__).with_name("recorded_drafts.txt").read_text().splitlines()
        self.answers: list[list[tuple[list[int], int]]] = [[]]
        for line in lines[2:]:
            if line:
                grades, right = line.split()
                self.answers[-1].append(([int(digit) for digit in grades], int(right)))
            else:
                self.answers.append([])

    def prior(self, grade: int) -> float:
        return logits.prior(grade)


def spikes(rng: random.Random) -> Callable[[float], float]:
    """A machine that others use, too: for a quarter of the time it is 1.3 to 3 times slower, a tenth of a second or two at a time."""
    ends, factors, now = [], [], 0.0
    while now < 120.0:
        for length, factor in ((rng.expovariate(1 / 0.45), 1.0), (rng.uniform(0.05, 0.25), rng.uniform(1.3, 3.0))):
            now += length
            ends.append(now)
            factors.append(factor)
    place = 0

    def slower(at: float) -> float:
        nonlocal place
        while ends[place] < at:
            place += 1
        return factors[place]

    return slower


def replay(recorded: Recorded, answers: list[int], length, clock, seed: int = 0, slower=lambda at: 1.0) -> float:
    """Seconds that these answers take."""
    rng = random.Random(seed)
    start = clock.now

    def spend(seconds: float) -> None:
        clock.now += seconds * slower(clock.now) * rng.lognormvariate(0, 0.03)

    for answer in answers:
        text, place, unread = recorded.answers[answer], 0, NEWEST
        while place < len(text):
            if rest := length.rest():
                times = []
                for _ in range(rest):
                    began = clock.now
                    spend(ROWS[1])
                    times.append(clock.now - began)
                length.rested(times)
                place, unread = place + rest, min(unread + rest, NEWEST)
                continue
            chain, right = text[place]
            began, grades = clock.now, []
            length.start(len(chain))
            while len(grades) < len(chain) and length.wants_law(0 if grades else max(unread - 2, 0)):
                spend(LAW if grades or unread == 1 else TWO if unread == 2 else LAW + unread * TOKEN)
                unread = 0
                if not length.wants_token(chain[len(grades)]):
                    break
                grades.append(chain[len(grades)])
            spend(ROWS[1 + len(grades)])
            accepted = min(right, len(grades))
            length.finish(grades, accepted, clock.now - began)
            all_stand = grades and accepted == len(grades)
            unread = (2 if all_stand else 1) if unread == 0 else min(unread + accepted + 1, NEWEST)
            place += accepted + 1
    return clock.now - start
