"""Links for tests, among them one that copies in halves and sleeps at random around each."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from threading import Event

import pytest
import torch

from offload.memory.cpu_link import EmulatedLink, Jobs, ZeroCopyLink
from offload.memory.link import Copy, Link
from support.slow import slow_except

CPU = torch.device("cpu")
LINKS = ["view", "emulated", "delaying"]
# parameters of the fixture `link`: all links, or in `make test` only the delaying one
every_link = pytest.mark.parametrize("link", LINKS, indirect=True)
worst_link = pytest.mark.parametrize("link", slow_except(LINKS, 2), indirect=True)


class DelayingLink(EmulatedLink):
    """A link that delays copies at random and splits each in two, so that reads that are too
    early, and writes that are too late, meet a torn copy.
    """

    def __init__(self, seed: int = 0, delay: float = 4e-4):
        self._random, self._delay = random.Random(seed), delay
        super().__init__(CPU, rate=1e9)

    @torch.inference_mode()  # destinations may be inference tensors
    def _run(self, jobs: Jobs) -> None:
        while job := jobs.get():
            pairs, _, done = job
            self._sleep()
            for destination, source in pairs:
                half = len(source) // 2
                destination[half:] = source[half:]
                self._sleep()
                destination[:half] = source[:half]
            self._sleep()
            done.set()

    def _sleep(self) -> None:
        if self._random.random() < 0.3:
            time.sleep(self._random.random() * self._delay)


def make_test_link(name: str) -> Link:
    """Return the link `view`, `emulated` (at a rate that takes no time) or `delaying`."""
    if name == "view":
        return ZeroCopyLink(CPU)
    return EmulatedLink(CPU, rate=1e12) if name == "emulated" else DelayingLink()


class CountingLink(EmulatedLink):
    """Counts copies and their bytes."""

    copies_made = copied_bytes = 0

    def copy(self, pairs: Sequence[Copy]) -> Event:
        self.copies_made += 1
        self.copied_bytes += sum(source.nbytes for _, source in pairs)
        return super().copy(pairs)
