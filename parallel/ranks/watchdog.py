"""A watchdog over the ranks: each sends heartbeats, and a rank that stops sending them is named.

A killed rank is noticed immediately, because its connections close. A rank that is stopped, or
hangs in a driver, keeps them open, and the others would wait for it silently.
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

SILENT_S = 60.0  # seconds without a heartbeat before a rank is named
_BEATS_PER_SILENCE = 12  # heartbeats per SILENT_S
_FAREWELL = "bye"  # last heartbeat of a rank that leaves


class Watchdog:
    """This rank's view of the state of its peers, and the thread that monitors them.

    Each rank's heartbeat in the store has the number of checks its thread has made, and the number
    of collectives the rank has entered. The lowest healthy rank reports two problems of others: a
    rank whose thread no longer checks (it is stopped, or hangs and holds the interpreter), and a
    rank that is running but has not reached the collective in which this one waits. Rank 0 may keep
    the others waiting indefinitely, for instance for a user's next question or a slow disk. The
    report is a warning: nothing is ended, since a stopped rank may resume.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        warn: Callable[[str], None] | None = None,
        silent_s: float | None = None,
    ):
        self.rank = rank
        self._warn = warn or partial(warn_from_rank, rank)
        self._silent_s = silent_s or SILENT_S
        # a separate connection: the group may be waiting on the other one
        self._store = PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=self._silent_s))
        self._collectives = 0  # number entered so far
        self._in_collective = False  # whether the last one is in progress
        now = time.monotonic()
        self._peers = {peer: _Peer(now) for peer in range(size) if peer != rank}
        # collective in which this rank waits, and the time it started
        self._waiting_since = (0, now)
        self._stopped = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start monitoring the peers, all of which have created their watchdogs."""
        self._thread.start()

    def arrive(self) -> None:
        """Record that this rank enters a collective."""
        self._collectives += 1
        self._in_collective = True

    def leave(self) -> None:
        """Record that the collective has finished."""
        self._in_collective = False

    def stop(self) -> None:
        """Stop monitoring, and tell the peers not to expect heartbeats."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(1)

    def _watch(self) -> None:
        interval = self._silent_s / _BEATS_PER_SILENCE
        last = time.monotonic()
        checks = 0
        while not self._stopped.wait(interval):
            checks += 1
            try:
                self._beat(checks)
                beats = self._store.multi_get([str(peer) for peer in self._peers])
            except DistStoreError:  # the store's process is stopped: the launcher, or else rank 0
                self._warn("the process that holds the ranks' rendezvous store does not respond.")
                return
            except RuntimeError:  # the store's process has ended
                return
            now = time.monotonic()
            # this process was stopped itself, so it missed heartbeats of its peers
            was_stopped = now - last > self._silent_s / 2
            last = now
            self._check(dict(zip(self._peers, beats, strict=True)), now, was_stopped)
        with suppress(RuntimeError):
            self._store.set(str(self.rank), _FAREWELL)

    def _beat(self, checks: int) -> None:
        self._store.set(str(self.rank), f"{checks} {self._collectives}")

    def _check(self, beats: dict[int, bytes], now: float, was_stopped: bool) -> None:
        """Compare the peers' heartbeats with the previous ones, and report what has changed."""
        collectives = self._collectives if self._in_collective else 0
        if was_stopped or collectives != self._waiting_since[0]:
            self._waiting_since = (collectives, now)
        for rank, beat in beats.items():
            peer = self._peers[rank]
            if beat != peer.beat or was_stopped:
                peer.beat, peer.last_beat_at = beat, now
        silent = {
            rank
            for rank, peer in self._peers.items()
            if peer.beat != _FAREWELL.encode() and now - peer.last_beat_at >= self._silent_s
        }
        is_overdue = collectives and now - self._waiting_since[1] >= self._silent_s
        lagging = {
            rank
            for rank, peer in self._peers.items()
            if is_overdue
            and rank not in silent | {0}
            and peer.beat != _FAREWELL.encode()
            and peer.collectives < collectives
        }
        # only the lowest healthy rank reports
        is_reporter = all(lower in silent or lower in lagging for lower in range(self.rank))
        for rank, peer in self._peers.items():
            problem = "silent" if rank in silent else "lagging" if rank in lagging else ""
            if problem and problem != peer.reported and is_reporter:
                self._warn(self._message(rank, problem))
                peer.reported = problem
            elif peer.reported and not problem:
                self._warn(f"rank {rank} has resumed.")
                peer.reported = ""

    def _message(self, rank: int, problem: str) -> str:
        description = (
            f"rank {rank} has not answered for {self._silent_s:.0f} s: its process is stopped, "
            "or starved of CPU time or memory"
            if problem == "silent"
            else f"rank {rank} is running, but for {self._silent_s:.0f} s has not reached the "
            f"collective in which rank {self.rank} waits"
        )
        return f"{description}. The job waits for it; Ctrl-C ends the job."


class _Peer:
    """The known state of another rank."""

    def __init__(self, now: float):
        self.beat = b""
        self.last_beat_at = now  # time of the last new heartbeat
        self.reported = ""  # problem that this rank has reported, empty without one

    @property
    def collectives(self) -> int:
        """The number of collectives it has entered."""
        fields = self.beat.split()
        return int(fields[1]) if len(fields) > 1 else 0
