"""Adaptive draft lengths end where tokens a second are most, in worlds whose acceptance and times
are known.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from decoding.speculation.draft_length import Adaptive, Fixed, RoundStats

MOST = 64


@dataclass(frozen=True)
class World:
    """Every drafted token stands with the same probability; a pass costs a line in its rows.
    Seconds.
    """

    rate: float
    draft: float
    verify: float
    row: float = 0.0

    def per_second(self, n: int) -> float:
        return (
            (1 - self.rate ** (n + 1))
            / (1 - self.rate)
            / (self.verify + self.row * (n + 1) + n * self.draft)
        )

    def round(self, n: int, rng: random.Random, noise: float = 0.0) -> RoundStats:
        accepted = next((at for at in range(n) if rng.random() >= self.rate), n)
        slow = 1 + noise * rng.random()
        return RoundStats(
            n, accepted, n + 1, slow * n * self.draft, slow * (self.verify + self.row * (n + 1))
        )

    @property
    def best(self) -> float:
        return max(self.per_second(n) for n in range(1, MOST + 1))


WORLDS = {
    "a link": World(rate=0.93, draft=0.002, verify=0.4),
    "a slow link and good drafts": World(rate=0.97, draft=0.002, verify=2.0),
    "a link and bad drafts": World(rate=0.6, draft=0.01, verify=0.4),
    "compute": World(rate=0.85, draft=0.003, verify=0.02, row=0.001),
    "drafts as dear as passes": World(rate=0.5, draft=0.02, verify=0.02),
    "rows dear": World(rate=0.9, draft=0.0001, verify=0.005, row=0.005),
}


def begun(start: int, most: int = MOST) -> Adaptive:
    length = Adaptive(most)
    length.reset(start)
    return length


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
@pytest.mark.parametrize("start", [1, 16])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_lengths_end_near_the_best(world: World, start: int, noise: float) -> None:
    rng, length = random.Random(1), begun(start)
    rates = []
    for number in range(120):
        if number >= 20:
            rates.append(world.per_second(length.next()))
        length.record(world.round(length.next(), rng, noise))
    assert sum(rates) / len(rates) > 0.93 * world.best


def test_a_text_that_changes_is_followed() -> None:
    rng, length = random.Random(2), begun(16)
    for world in (WORLDS["a slow link and good drafts"], WORLDS["a link and bad drafts"]) * 2:
        for _ in range(80):
            length.record(world.round(length.next(), rng))
        assert world.per_second(length.next()) > 0.9 * world.best


def test_one_pass_that_took_for_ever_changes_little() -> None:
    rng, length, world = random.Random(3), begun(6), WORLDS["compute"]
    for _ in range(60):
        length.record(world.round(length.next(), rng))
    before = length.next()
    length.record(RoundStats(before, before, before + 1, before * world.draft, 30.0))
    assert abs(length.next() - before) <= 3


@pytest.mark.parametrize("most", [1, 2, 16])
def test_lengths_stay_within_their_bounds(most: int) -> None:
    rng, length = random.Random(4), begun(16, most)
    for _ in range(200):
        n = length.next()
        assert 1 <= n <= most
        length.record(RoundStats(n, rng.randint(0, n), n + 1, rng.random(), rng.random()))


def test_a_round_without_a_draft_says_what_a_pass_costs_and_nothing_of_acceptance() -> None:
    length = begun(5)
    for _ in range(50):
        length.record(RoundStats(0, 0, 1, 0.0, 0.1))
    assert length.next() == 5
    assert length.acceptance == pytest.approx(0.93)


def test_a_fixed_length_is_fixed() -> None:
    length = Fixed(7)
    length.record(RoundStats(7, 0, 8, 1.0, 1.0))
    assert length.next() == length.max_length == 7


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_the_next_text_begins_with_what_was_learnt(world: World) -> None:
    rng, length = random.Random(5), begun(16)
    for _ in range(60):
        length.record(world.round(length.next(), rng))
    learnt = length.next()
    length.reset(1)
    assert length.next() == learnt


def test_the_next_text_soon_counts_more_than_the_one_before() -> None:
    """Its passes cost ten times as much, and half as many tokens stand."""
    rng, length = random.Random(6), begun(16)
    for _ in range(200):
        length.record(World(rate=0.97, draft=0.002, verify=0.02).round(length.next(), rng))
    now = World(rate=0.5, draft=0.002, verify=0.2)
    length.reset(16)
    for _ in range(30):
        length.record(now.round(length.next(), rng))
    assert now.per_second(length.next()) > 0.9 * now.best


def test_a_context_that_costs_a_hundred_times_as_much_is_believed_at_once() -> None:
    """Behind a short text on the device comes a long one over a link."""
    rng, length = random.Random(7), begun(6)
    for _ in range(40):
        length.record(World(rate=0.9, draft=0.002, verify=0.01).round(length.next(), rng))
    now = World(rate=0.9, draft=0.002, verify=1.0)
    length.reset(32)
    for _ in range(3):
        length.record(now.round(length.next(), rng))
    assert now.per_second(length.next()) > 0.9 * now.best
