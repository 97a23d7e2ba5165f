"""A grid of settings, all timed on the same texts: the loop of `decode`, `lengths` and `tune`.

Settings are interleaved, and each text begins with another of them, so that none is always the
first. How much of a draft stands is a matter of luck, which a hundred rounds do not even out. So
beside the plain ms/token there is an expected one: the seconds of a setting over the tokens that
its drafts yield on average, given how often proposals stand at each place of a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TypeVar

from rich.console import Console

from bench.harness.decode_loop import Run
from decoding.speculation.draft_length import RoundStats

Setting = TypeVar("Setting", bound=Hashable)
say = partial(Console(stderr=True).print, highlight=False, markup=False, soft_wrap=True)


@dataclass
class Series:
    """All runs of one setting."""

    runs: list[Run] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(run.seconds for run in self.runs)

    @property
    def times(self) -> list[float]:
        """Milliseconds a token, of each run."""
        return [run.ms_per_token for run in self.runs]

    @property
    def ms_per_token(self) -> float:
        return 1e3 * self.seconds / sum(run.tokens for run in self.runs)

    @property
    def rounds(self) -> list[RoundStats]:
        return list(chain(*(run.rounds for run in self.runs)))

    def expected_tokens(self, yields: Sequence[float]) -> float:
        """Return the tokens that its drafts yield on average."""
        return sum(yields[each.drafted] for each in self.rounds)

    def expected_ms_per_token(self, yields: Sequence[float]) -> float:
        return 1e3 * self.seconds / self.expected_tokens(yields)


def time_text(
    methods: Mapping[Setting, Callable[[], Run]],
    series: dict[Setting, Series],
    turn: int,
    title: str,
) -> None:
    """Run every method once, beginning with the one whose turn it is, and keep the runs."""
    settings = list(methods)
    first = turn % len(settings)
    for setting in settings[first:] + settings[:first]:
        run = methods[setting]()
        series.setdefault(setting, Series()).runs.append(run)
        say(f"{title}, {named(setting)}: {run.ms_per_token:.1f} ms/token")


def named(setting: Hashable) -> str:
    """Return a setting in words, for the display of progress."""
    return ", ".join(map(str, setting)) if isinstance(setting, tuple) else str(setting)


def expected_yields(rounds: Sequence[RoundStats]) -> list[float]:
    """Return the tokens that a verified draft of 0, 1, ... tokens yields on average.

    That is 1 + sum_k prod_(i<=k) (1 - h_i). h_i is how often a proposal at place i was rejected
    when all before it stood: the product-limit estimate of Kaplan and Meier 1958, for a draft that
    ended, or stood whole, tells nothing of later places.
    """
    yields, standing = [1.0], 1.0
    for place in range(max(each.drafted for each in rounds)):
        tested = sum(place <= each.accepted and place < each.drafted for each in rounds)
        rejected = sum(each.accepted == place < each.drafted for each in rounds)
        standing *= 1 - rejected / tested if tested else 1
        yields.append(yields[-1] + standing)
    return yields
