"""Adaptive draft lengths converge to the most tokens per second, in simulations with a known
acceptance rate and known seconds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from decoding import Settings
from decoding.config.defaults import MAX_DRAFT, MAX_SPLIT_DRAFT
from decoding.speculation.draft_length import (
    Adaptive,
    DraftLength,
    Fixed,
    RoundStats,
    draft_lengths,
)
from support.slow import slow_except

MAX_LENGTH = 64


@dataclass(frozen=True)
class World:
    """A constant acceptance rate, and forwards whose seconds are linear in their rows."""

    rate: float  # acceptance rate
    draft: float  # seconds per draft token
    verify: float  # seconds of a verification
    row: float = 0.0  # seconds per row of a verification

    def tokens_per_second(self, n: int) -> float:
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
        return max(self.tokens_per_second(n) for n in range(1, MAX_LENGTH + 1))


WORLDS = {
    "host link": World(rate=0.93, draft=0.002, verify=0.4),
    "slow link, good drafts": World(rate=0.97, draft=0.002, verify=2.0),
    "host link, bad drafts": World(rate=0.6, draft=0.01, verify=0.4),
    "compute": World(rate=0.85, draft=0.003, verify=0.02, row=0.001),
    "drafts as slow as verification": World(rate=0.5, draft=0.02, verify=0.02),
    "slow rows": World(rate=0.9, draft=0.0001, verify=0.005, row=0.005),
}


def adaptive(start: int, max_length: int = MAX_LENGTH) -> Adaptive:
    length = Adaptive(max_length)
    length.reset(start)
    return length


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
@pytest.mark.parametrize("start", [1, 16])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_lengths_converge_near_the_best(world: World, start: int, noise: float) -> None:
    rng, length = random.Random(1), adaptive(start)
    rates = []
    for number in range(120):
        if number >= 20:
            rates.append(world.tokens_per_second(length.next()))
        length.record(world.round(length.next(), rng, noise))
    assert sum(rates) / len(rates) > 0.93 * world.best


def speed_ahead(world: World, length: DraftLength, meanwhile: int, rounds: int = 3000) -> float:
    """Return the tokens per second of rounds with `meanwhile` tokens drafted in a verification."""
    rng, ahead, tokens, seconds = random.Random(1), 0, 0, 0.0
    for _ in range(rounds):
        n = max(length.next(), ahead)
        timed = world.round(n, rng)
        is_tested = timed.accepted == n
        is_kept = is_tested and rng.random() < world.rate
        stats = replace(
            timed,
            drafted=n + is_tested,
            accepted=timed.accepted + is_kept,
            draft_s=(n - ahead) * world.draft,
            ahead=ahead + is_tested,
            meanwhile=meanwhile,
        )
        length.record(stats)
        tokens += timed.accepted + 1
        seconds += stats.draft_s + stats.verify_s
        ahead = meanwhile - 1 if is_kept else 0
    return tokens / seconds


@pytest.mark.parametrize("meanwhile", slow_except([1, 8, 40], 1))
@pytest.mark.parametrize("rate", [0.9, 0.99])
def test_lengths_with_tokens_drafted_ahead_converge_near_the_best(
    rate: float, meanwhile: int
) -> None:
    world = World(rate, draft=0.02, verify=0.8)
    best = max(speed_ahead(world, Fixed(n), meanwhile) for n in range(1, MAX_LENGTH + 1, 3))
    assert speed_ahead(world, adaptive(32), meanwhile) > 0.95 * best


def test_lengths_adapt_to_changes_within_a_request() -> None:
    rng, length = random.Random(2), adaptive(16)
    for world in (WORLDS["slow link, good drafts"], WORLDS["host link, bad drafts"]) * 2:
        for _ in range(80):
            length.record(world.round(length.next(), rng))
        assert world.tokens_per_second(length.next()) > 0.9 * world.best


def test_one_very_slow_forward_changes_little() -> None:
    rng, length, world = random.Random(3), adaptive(6), WORLDS["compute"]
    for _ in range(60):
        length.record(world.round(length.next(), rng))
    before = length.next()
    length.record(RoundStats(before, before, before + 1, before * world.draft, 30.0))
    assert abs(length.next() - before) <= 3


@pytest.mark.parametrize("max_length", [1, 2, 16])
def test_lengths_stay_within_their_bounds(max_length: int) -> None:
    rng, length = random.Random(4), adaptive(16, max_length)
    for _ in range(200):
        n = length.next()
        assert 1 <= n <= max_length
        length.record(RoundStats(n, rng.randint(0, n), n + 1, rng.random(), rng.random()))


def test_rounds_without_a_draft_do_not_change_the_acceptance_rate() -> None:
    length = adaptive(5)
    for _ in range(50):
        length.record(RoundStats(0, 0, 1, 0.0, 0.1))
    assert length.next() == 5
    assert length.acceptance == pytest.approx(0.93)


def test_a_fixed_length_is_constant() -> None:
    length = Fixed(7)
    length.record(RoundStats(7, 0, 8, 1.0, 1.0))
    assert length.next() == length.max_length == 7


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_the_next_request_starts_with_the_learned_length(world: World) -> None:
    rng, length = random.Random(5), adaptive(16)
    for _ in range(60):
        length.record(world.round(length.next(), rng))
    learned = length.next()
    length.reset(1)
    assert length.next() == learned


def test_a_new_request_soon_outweighs_the_previous_one() -> None:
    """Its forwards take ten times as long, and about half as many draft tokens are accepted."""
    rng, length = random.Random(6), adaptive(16)
    for _ in range(200):
        length.record(World(rate=0.97, draft=0.002, verify=0.02).round(length.next(), rng))
    new = World(rate=0.5, draft=0.002, verify=0.2)
    length.reset(16)
    for _ in range(30):
        length.record(new.round(length.next(), rng))
    assert new.tokens_per_second(length.next()) > 0.9 * new.best


def test_forwards_that_take_a_hundred_times_as_long_are_adapted_to_at_once() -> None:
    """A short request on the device is followed by a long one over the host link."""
    rng, length = random.Random(7), adaptive(6)
    for _ in range(40):
        length.record(World(rate=0.9, draft=0.002, verify=0.01).round(length.next(), rng))
    new = World(rate=0.9, draft=0.002, verify=1.0)
    length.reset(32)
    for _ in range(3):
        length.record(new.round(length.next(), rng))
    assert new.tokens_per_second(length.next()) > 0.9 * new.best


@pytest.mark.parametrize(
    ("mode", "longest"),
    [
        ("split", MAX_SPLIT_DRAFT),
        ("split-hierarchical", MAX_SPLIT_DRAFT),
        ("hierarchical", MAX_DRAFT),
        ("plain", MAX_DRAFT),
    ],
)
def test_the_longest_draft_follows_from_the_mode(mode: str, longest: int) -> None:
    """Nearly all draft tokens are accepted, and they are cheap."""
    world = World(rate=0.999, draft=0.0001, verify=0.4)
    outer, *inner = draft_lengths(Settings(), mode)
    rng = random.Random(0)
    outer.reset(32)
    for _ in range(100):
        outer.record(world.round(outer.next(), rng))
    assert outer.next() == longest
    assert [length.max_length for length in inner if isinstance(length, Adaptive)] == [16, 16]
    fixed = draft_lengths(Settings(num_draft_tokens=200), mode)[0]
    assert fixed.next() == 200
