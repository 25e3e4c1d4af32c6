"""A world with a virtual clock in which drafts have known costs and a known law of acceptance, to judge length controllers.

The text has spells: in each, a place is easy or hard, and the drafter's grade tells which of the two only partly.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

STRETCH = 1.7  # seconds between changes of a restless machine


@dataclass
class World:
    """Costs in seconds; `rows[k]` is a step of k rows. `accept[g]` is the true acceptance of grade g, `mix` how often each occurs.

    stay  probability that a place has the grade of the one before
    reading  of a token that the drafter has not read yet when it is asked, beyond the last two, at most 6
    cold  the first law of all takes so many times longer
    restless  the machine is so many times slower for stretches of time, as when other programs run
    """

    rows: list[float]
    first_law: float
    next_law: float
    accept: list[float]
    mix: list[float]
    stay: float = 0.5
    noise: float = 0.05
    reading: float = 0.0
    cold: float = 1.0
    restless: float = 1.0
    guess: tuple[float, float] = (0.35, 0.06)

    name = "simulated"

    @property
    def grades(self) -> int:
        return len(self.accept)

    def prior(self, grade: int) -> float:
        return self.guess[0] + self.guess[1] * grade


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def play(world: World, length, clock: Clock, tokens: int, seed: int = 0, boundary: int = 256) -> float:
    """Generates so many tokens; returns the seconds it took."""
    rng = random.Random(seed)
    start, made, grade, unread = clock.now, 0, 0, 8
    cold = world.cold
    upcoming: list[int] = []  # grades of the places ahead: properties of the text, not of who asks

    def spend(seconds):
        slow = world.restless if clock.now // STRETCH % 2 else 1.0
        clock.now += seconds * slow * rng.lognormvariate(0, world.noise)

    def grade_at(place):
        nonlocal grade
        while len(upcoming) <= place:
            if rng.random() > world.stay:
                grade = rng.choices(range(world.grades), world.mix)[0]
            upcoming.append(grade)
        return upcoming[place]

    while made < tokens:
        if rest := length.rest():
            times = []
            for _ in range(rest):
                began = clock.now
                spend(world.rows[1])
                times.append(clock.now - began)
                grade_at(0)
                del upcoming[:1]
            length.rested(times)
            made, unread = made + rest, unread + rest
            continue
        began, grades = clock.now, []
        length.start(boundary - made % boundary - 1)
        behind = min(max(unread - 2, 0), 6)
        while length.wants_law(0 if grades else behind):
            spend(cold * (world.next_law if grades else world.first_law + behind * world.reading))
            cold = 1.0
            unread = 0
            if not length.wants_token(grade_at(len(grades))):
                break
            grades.append(grade_at(len(grades)))
        spend(world.rows[1 + len(grades)])
        accepted = 0
        while accepted < len(grades) and rng.random() < world.accept[grades[accepted]]:
            accepted += 1
        length.finish(grades, accepted, clock.now - began)
        grade_at(accepted)
        del upcoming[: accepted + 1]
        made += accepted + 1
        read_guesses = unread == 0
        unread = (2 if grades and accepted == len(grades) else 1) if read_guesses else unread + accepted + 1
    return (clock.now - start) * tokens / made
