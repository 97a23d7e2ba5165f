"""A link with the worst manners: it copies in pieces, and sleeps a random while before and after
each.
"""

from __future__ import annotations

import random
import time

import pytest
import torch

from offload.memory.cpu_link import EmulatedLink, Jobs, ZeroCopyLink
from offload.memory.link import Link
from support.slow import slow_except

CPU = torch.device("cpu")
LINKS = ["view", "emulated", "delaying"]
# the fixture `link`: each of them, or in `make test` the one with the worst manners alone
every_link = pytest.mark.parametrize("link", LINKS, indirect=True)
worst_link = pytest.mark.parametrize("link", slow_except(LINKS, 2), indirect=True)


class DelayingLink(EmulatedLink):
    """Holds up copies at random, each torn in two: what reads early, or is overwritten late, is
    caught in the middle.
    """

    def __init__(self, seed: int = 0, delay: float = 4e-4):
        self._random, self._delay = random.Random(seed), delay
        super().__init__(CPU, rate=1e9)

    def _run(self, jobs: Jobs) -> None:
        while job := jobs.get():
            pairs, _, done = job
            self._dawdle()
            for destination, source in pairs:
                half = len(source) // 2
                destination[half:] = source[half:]
                self._dawdle()
                destination[:half] = source[:half]
            self._dawdle()
            done.set()

    def _dawdle(self) -> None:
        if self._random.random() < 0.3:
            time.sleep(self._random.random() * self._delay)


def make_test_link(name: str) -> Link:
    """`view`, `emulated` (at a rate that costs nothing) or `delaying`."""
    if name == "view":
        return ZeroCopyLink(CPU)
    return EmulatedLink(CPU, rate=1e12) if name == "emulated" else DelayingLink()
