"""A watch over the ranks: each of them shows now and then that it runs, and who does not is named.

A rank that was killed is noticed at once, by its connections. One that was stopped, or hangs in a
driver, keeps them, and the others would wait for it in silence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial

from torch.distributed import DistStoreError, PrefixStore, Store

from parallel.ranks.environment import warn_from_rank

SILENT_S = 60.0  # seconds after which a rank is named
_BEATS = 12  # in that time
_BYE = "bye"  # what a rank that leaves has written last


class Watchdog:
    """What this rank knows of how the others are, and the thread that looks after them.

    Every rank writes to the store how often its thread has looked, and how many collectives it has
    come to. Two things are told, by the lowest rank that is not itself concerned: that a rank's
    thread no longer looks (it is stopped, or hangs and holds the interpreter), and that a rank
    which looks has not come to the collective in which this one waits. Rank 0 may keep the others
    waiting as long as it likes: for a person's next question, or a slow disk. It is a warning:
    nothing is ended, since what was stopped may go on.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        say: Callable[[str], None] | None = None,
        silent_s: float | None = None,
    ):
        self.rank = rank
        self._say = say or partial(warn_from_rank, rank)
        self._silent_s = silent_s or SILENT_S
        # a connection of its own: the group may wait on the other one
        self._store = PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=self._silent_s))
        self._come_to = 0  # collectives
        self._waits = False  # in the last of them
        now = time.monotonic()
        self._others = {other: _Other(now) for other in range(size) if other != rank}
        self._arrived_at = (0, now)  # the collective in which this rank waits, and since when
        self._over = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Look after the others from now on; all of them have made their watchdog."""
        self._thread.start()

    def arrive(self) -> None:
        """Note that this rank has come to a collective."""
        self._come_to += 1
        self._waits = True

    def leave(self) -> None:
        """Note that the collective is over."""
        self._waits = False

    def stop(self) -> None:
        """Take leave: this rank's silence means nothing from now on."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(1)

    def _watch(self) -> None:
        every = self._silent_s / _BEATS
        last = time.monotonic()
        looks = 0
        while not self._over.wait(every):
            looks += 1
            try:
                self._beat(looks)
                beats = self._store.multi_get([str(other) for other in self._others])
            except DistStoreError:  # who holds the store is stopped: rank 0, where no launcher does
                self._say("whoever brought the ranks together does not answer any more.")
                return
            except RuntimeError:  # or is gone
                return
            now = time.monotonic()
            # this process was itself stopped, and knows nothing of the time between
            blind = now - last > self._silent_s / 2
            last = now
            self._look(dict(zip(self._others, beats, strict=True)), now, blind)
        with suppress(RuntimeError):
            self._store.set(str(self.rank), _BYE)

    def _beat(self, looks: int) -> None:
        self._store.set(str(self.rank), f"{looks} {self._come_to}")

    def _look(self, beats: dict[int, bytes], now: float, blind: bool) -> None:
        """Compare what the others wrote with what they wrote before, and tell what has changed."""
        come_to = self._come_to if self._waits else 0
        if blind or come_to != self._arrived_at[0]:
            self._arrived_at = (come_to, now)
        for number, beat in beats.items():
            other = self._others[number]
            if beat != other.beat or blind:
                other.beat, other.changed = beat, now
        silent = {
            number
            for number, other in self._others.items()
            if other.beat != _BYE.encode() and now - other.changed >= self._silent_s
        }
        waited = come_to and now - self._arrived_at[1] >= self._silent_s
        deferred = {
            number
            for number, other in self._others.items()
            if waited
            and number not in silent | {0}
            and other.beat != _BYE.encode()
            and other.come_to < come_to
        }
        # of those who can speak, the lowest does
        speaks = all(other in silent or other in deferred for other in range(self.rank))
        for number, other in self._others.items():
            concern = "silent" if number in silent else "deferred" if number in deferred else ""
            if concern and concern != other.warned and speaks:
                self._say(self._words(number, concern))
                other.warned = concern
            elif other.warned and not concern:
                self._say(f"rank {number} goes on.")
                other.warned = ""

    def _words(self, number: int, concern: str) -> str:
        found = (
            f"rank {number} has not answered for {self._silent_s:.0f} s: its process is stopped, "
            "or gets no time or memory"
            if concern == "silent"
            else f"rank {number} runs, but for {self._silent_s:.0f} s has not come to where rank "
            f"{self.rank} waits for it"
        )
        return f"{found}. The job waits for it. Ctrl-C ends it."


class _Other:
    """What is known of another rank."""

    def __init__(self, now: float):
        self.beat = b""
        self.changed = now  # when the beat last did
        self.warned = ""  # the concern that this rank has told of

    @property
    def come_to(self) -> int:
        """The collectives it has come to."""
        words = self.beat.split()
        return int(words[1]) if len(words) > 1 else 0
