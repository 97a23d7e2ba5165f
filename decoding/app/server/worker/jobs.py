"""Requests queued for the engine, and the events that it sends back to their clients."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition
from typing import Any

from decoding.app.server.worker import limits
from decoding.grammars.grammar import CompiledGrammar
from decoding.speculation.sampling import Sampling
from offload.errors import TierForceError
from parallel.model.prompt_logprobs import PromptLogprobs


@dataclass(frozen=True)
class GenerationParams:
    """A prompt and the options of its request, as the engine takes them."""

    prompt: array[int]  # 4 bytes per token: many requests may be queued
    max_new_tokens: int
    sampling: Sampling
    stops: tuple[str, ...] = ()
    top_logprobs: int | None = None  # None: no log-probabilities are requested
    grammar: CompiledGrammar | None = None  # the answer matches it
    returns_ids: bool = False  # the answer has the ids of its tokens, and of the prompt's
    # text of special tokens that the answer has, by id
    shown_tokens: Mapping[int, str] = field(default_factory=dict)
    is_clipped: bool = False  # fewer new tokens than were asked for, since the context has no more
    has_echo: bool = False  # the answer begins with the prompt
    text: str | None = None  # the prompt to echo, if it was sent as a string
    num_prompt_logprobs: int | None = None  # as in `decoding.engine.request.Request`


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of a token, and of the most likely tokens at its position.

    Nothing precedes the first token of a prompt, so it has none.
    """

    token: bytes
    logprob: float | None = None  # the target's, before all that changes its distribution
    # after them: in the distribution that the token was sampled from; None in a prompt
    sampled_logprob: float | None = None
    top: Sequence[tuple[bytes, float]] = ()


@dataclass(frozen=True)
class ProgressUpdate:
    """Progress of a request, sent as a comment in a stream.

    `{"waiting": N}`: N requests come first, including those being answered;
    `{"prefill": [done, total]}`: progress of the prefill; `{"counts": {...}}`: statistics so far.
    """

    data: dict[str, Any]


@dataclass(frozen=True)
class PromptScored:
    """The log-probabilities of a prompt's tokens, which precede the answer."""

    logprobs: PromptLogprobs


@dataclass(frozen=True)
class TextDelta:
    """The next part of the answer, and the tokens that begin in it."""

    text: str
    logprobs: Sequence[tuple[int, TokenLogprobs]] = ()  # offset in the whole answer, per token
    token_ids: Sequence[int] = ()  # tokens generated since the last part

    @classmethod
    def joined(cls, parts: Sequence[TextDelta]) -> TextDelta:
        """Return several parts as one."""
        return cls(
            "".join(part.text for part in parts),
            [each for part in parts for each in part.logprobs],
            [each for part in parts for each in part.token_ids],
        )

    def after(self, characters: int) -> TextDelta:
        """Return the part in an answer that begins with so many other characters."""
        logprobs = [(offset + characters, token) for offset, token in self.logprobs]
        return TextDelta(self.text, logprobs, self.token_ids)


@dataclass(frozen=True)
class Finished:
    """The end of a complete answer."""

    reason: str  # "stop" or "length"
    counts: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """An error that replaces the answer, or the rest of it."""

    status: int  # HTTP status
    message: str
    code: str | None = None
    param: str | None = None  # field of the request that caused the error
    details: dict[str, int] | None = None  # numbers for programs


INTERNAL_ERROR = Failed(500, "internal error: see the server's log.")
Event = ProgressUpdate | PromptScored | TextDelta | Finished | Failed


@dataclass(eq=False)
class QueuedRequest:
    """One of a request's prompts, queued or being answered.

    It is created in the event loop of its client.
    """

    params: GenerationParams
    index: int = 0  # among the request's prompts
    # events of all prompts of the request, with their indices
    events: asyncio.Queue[tuple[int, Event]] = field(default_factory=asyncio.Queue)
    # prompts of the request that are not queued yet: one of them takes this one's place
    successors: deque[QueuedRequest] = field(default_factory=deque, repr=False)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    is_over: bool = False  # True: its client needs nothing more

    @classmethod
    def batch(cls, params: Sequence[GenerationParams]) -> list[QueuedRequest]:
        """Return the prompts of one request."""
        events, successors = asyncio.Queue[tuple[int, Event]](), deque[QueuedRequest]()
        return [cls(each, index, events, successors) for index, each in enumerate(params)]

    def send(self, event: Event) -> None:
        """Send an event to the client; from any thread.

        A client with too many unread events gets no more of them, since they are held in memory.
        """
        if self.events.qsize() >= limits.UNREAD_EVENTS and not isinstance(event, Finished | Failed):
            if not self.is_over:
                self.fail(
                    Failed(
                        503,
                        f"the answer was aborted: {limits.UNREAD_EVENTS:,} parts of it are unread. "
                        "Read it faster.",
                    )
                )
            return
        with suppress(RuntimeError):  # the loop is closed: the client is gone
            self.loop.call_soon_threadsafe(self.events.put_nowait, (self.index, event))

    def fail(self, failed: Failed) -> None:
        """End the request with an error; from any thread."""
        self.is_over = True
        self.send(failed)


class QueueFull(TierForceError):
    """The queue has no place for another request."""


class RequestQueue:
    """The queue of the one engine, first come, first served; for any thread."""

    def __init__(self, limit: int, concurrency: int = 1):
        """Queue at most `limit` requests, while `concurrency` others are answered."""
        self.limit, self.concurrency = limit, concurrency
        self._waiting: deque[QueuedRequest] = deque()
        self._running: list[QueuedRequest] = []
        self._changed = Condition()
        self._closed: Failed | None = None

    def put(self, batch: Sequence[QueuedRequest]) -> None:
        """Append the prompts of a request; they fail if the queue is closed. Raises QueueFull.

        They take at most `concurrency` places, and no more than are free. The other prompts wait
        outside: one of them is appended whenever one of the request is finished. So no client's
        prompts crowd out those of others, and none waits for a place that its own take.
        """
        with self._changed:
            free = self.limit + self.concurrency - len(self._waiting) - self.running
            if self._closed is None and free < 1:
                raise QueueFull(
                    f"the queue is full: {self.limit} requests are waiting. Try again later."
                )
            count = max(1, min(self.concurrency, free))
            batch[0].successors.extend(batch[count:])
            for request in batch[:count]:
                self._append(request)

    def take(self, wait: bool = True) -> list[QueuedRequest] | None:
        """Return the next requests that there is room for, and run them; None once closed.

        `wait`: until there is at least one.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._waiting or self._closed is not None)
            if self._closed is not None:
                return None
            room = self.concurrency - len(self._running)
            taken = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
            self._running += taken
            if taken:
                self._send_positions()
            return taken

    def finish(self, request: QueuedRequest) -> None:
        """Make room for another prompt: if its request has one, that gets the place."""
        with self._changed:
            self._running.remove(request)
            if request.successors:
                self._append(request.successors.popleft())

    def cancel(self, batch: Sequence[QueuedRequest]) -> None:
        """Stop work on a request whose client is gone or has all of its answer."""
        with self._changed:
            batch[0].successors.clear()
            for request in batch:
                request.is_over = True
                if request in self._waiting:
                    self._waiting.remove(request)
                    self._send_positions()

    def close(self, failed: Failed) -> None:
        """End all requests with an error, and those that are put later, too."""
        with self._changed:
            if self._closed is not None:
                return
            self._closed = failed
            requests = [*self._waiting, *self._running]
            self._waiting.clear()
            for request in requests:
                request.fail(failed)
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    @property
    def waiting(self) -> int:
        """Return the number of queued requests."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Return the number of requests being answered."""
        return len(self._running)

    def _append(self, request: QueuedRequest) -> None:
        if self._closed is not None:
            request.fail(self._closed)
            return
        self._waiting.append(request)
        self._send_positions()
        self._changed.notify()

    def _send_positions(self) -> None:
        for position, request in enumerate(self._waiting):
            request.send(ProgressUpdate({"waiting": position + self.running}))
