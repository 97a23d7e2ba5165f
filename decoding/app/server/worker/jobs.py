"""Requests on their way from the clients to the engine, and what it tells them on the way back."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition
from typing import Any

from decoding.app.server.worker import limits
from decoding.speculation.sampling import Sampling
from offload.errors import TierForceError


@dataclass(frozen=True)
class GenerationParams:
    """What a request asks for, as the engine takes it."""

    prompt: array[int]  # of 4 bytes: many may wait
    new: int
    sampling: Sampling
    stops: tuple[str, ...] = ()
    top_logprobs: int | None = None  # None where no probabilities are wanted


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token that was written, and those of the likeliest in its place."""

    token: bytes
    logprob: float  # by the target's logits
    sampled_logprob: float  # by the law that it was drawn from: warped by temperature, top-k, top-p
    top: list[tuple[bytes, float]]


@dataclass(frozen=True)
class QueueUpdate:
    """Progress, as a comment in a stream has it.

    `{"waiting": N}` requests come first, the one that is being answered among them; `{"prefill":
    [done, total]}` of the prompt; or `{"counts": {...}}`, what the answer took so far.
    """

    said: dict[str, Any]


@dataclass(frozen=True)
class TextDelta:
    """More of the answer, with the tokens that it ends with."""

    text: str
    logprobs: Sequence[
        tuple[int, TokenLogprobs]
    ] = ()  # each behind where it stands in the whole answer


@dataclass(frozen=True)
class Finished:
    """The answer is complete."""

    reason: str  # "stop" or "length"
    counts: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """There is no answer, or no more of it."""

    status: int  # of HTTP
    message: str
    code: str | None = None
    param: str | None = None  # the field that is to blame
    details: dict[str, int] | None = None  # numbers for programs


BROKEN = Failed(500, "the server failed at this request; its log says how.")
Event = QueueUpdate | TextDelta | Finished | Failed


@dataclass(eq=False)
class QueuedRequest:
    """A request that waits or is being answered; made in the event loop that its client is in."""

    params: GenerationParams
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    is_over: bool = False  # nobody waits for more of it

    def send(self, event: Event) -> None:
        """Let the client hear of something; from any thread.

        A client that is too far behind gets no more: what it has not read is in memory.
        """
        if self.events.qsize() >= limits.UNREAD_EVENTS and not isinstance(event, Finished | Failed):
            if not self.is_over:
                self.fail(Failed(503, "the answer was read too slowly and ends here."))
            return
        with suppress(RuntimeError):  # the loop is closed: nobody listens
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)

    def fail(self, failed: Failed) -> None:
        """End it; from any thread."""
        self.is_over = True
        self.send(failed)


class QueueFull(TierForceError):
    """More requests wait than may."""


class RequestQueue:
    """The requests that wait for the one engine, in their order; for any thread."""

    def __init__(self, limit: int):
        """Let at most `limit` wait."""
        self.limit = limit
        self._waiting: deque[QueuedRequest] = deque()
        self._current: QueuedRequest | None = None
        self._changed = Condition()
        self._closed: Failed | None = None

    def put(self, job: QueuedRequest) -> None:
        """Let a job wait its turn. Raises QueueFull."""
        with self._changed:
            if self._closed is not None:
                job.fail(self._closed)
                return
            if len(self._waiting) + self.running > self.limit:
                raise QueueFull(
                    f"{self.limit} requests wait already: try again when some are answered."
                )
            self._waiting.append(job)
            self._send_positions()
            self._changed.notify()

    def take(self) -> QueuedRequest | None:
        """Return the next job, which is the current one from then on; None when it is closed."""
        with self._changed:
            self._current = None
            self._changed.wait_for(lambda: self._waiting or self._closed is not None)
            if self._closed is not None:
                return None
            self._current = self._waiting.popleft()
            self._send_positions()
            return self._current

    def cancel(self, job: QueuedRequest) -> None:
        """Let nothing more be done for a job: its client is gone, or has what it wants."""
        with self._changed:
            job.is_over = True
            if job in self._waiting:
                self._waiting.remove(job)
                self._send_positions()

    def close(self, failed: Failed) -> None:
        """End all jobs, and those that come later, with what they are told."""
        with self._changed:
            if self._closed is not None:
                return
            self._closed = failed
            jobs = [*self._waiting, *([self._current] if self._current else [])]
            self._waiting.clear()
            for job in jobs:
                job.fail(failed)
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    @property
    def waiting(self) -> int:
        """Return how many wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Return how many are being answered: 0 or 1."""
        return int(self._current is not None)

    def _send_positions(self) -> None:
        for before, job in enumerate(self._waiting):
            job.send(QueueUpdate({"waiting": before + self.running}))
