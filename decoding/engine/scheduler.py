"""The engine's loop on rank 0: requests are admitted, share forwards, and end.

A forward reads all weights of its model, however few its tokens are; requests that share it read
them once. Requests join and leave between forwards (Yu et al. 2022, Orca, section 4.1), each with
its own caches, generator and counts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor

from decoding.engine.cache_pool import CachePool
from decoding.engine.request import Request, RequestState, Status
from decoding.engine.session_manager import SequenceManager
from decoding.speculation.coroutines import Clock
from decoding.speculation.draft_length import Lengths
from offload.errors import InsufficientMemoryError, TierForceError, is_out_of_memory, one_line
from parallel.ranks.environment import RankLost


class Scheduler:
    """Runs requests on rank 0; the other ranks take part in their forwards.

    A request that fails ends with its error, and the others continue. An error of the program, or a
    lost rank, ends all of them.
    """

    def __init__(self, sessions: SequenceManager, context: int, stop_tokens: frozenset[int]):
        """Run sequences of at most `context` tokens, which `sessions` opens on all ranks."""
        self.sessions, self.context, self.stop_tokens = sessions, context, stop_tokens
        self.lengths: dict[str, Lengths] = {}  # draft lengths by mode, adapted over all requests
        self.caches = CachePool(sessions, context)
        self.concurrency = 1  # requests that share the memory
        self._clock = Clock()
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []

    @property
    def is_busy(self) -> bool:
        """Return whether a request is waiting or running."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> RequestState:
        """Append a request to those that wait, and return its state."""
        state = RequestState(request)
        self._waiting.append(state)
        return state

    def step(self) -> list[RequestState]:
        """Prefill the requests that there is room for; if there are none, run one forward.

        Returns the requests that took part: each may have new tokens, or have finished. Raises
        errors that end all requests; all caches are freed then.
        """
        try:
            return self._admit() or self._forward()
        except BaseException:
            self.close()  # an interrupted forward cannot be resumed
            raise

    def abort(self, state: RequestState) -> None:
        """End a request between two steps, unless it has finished."""
        if state in self._waiting:
            self._waiting.remove(state)
        if not state.is_finished:
            self._finish(state, keep=True)

    def close(self) -> None:
        """End all requests, and free all caches."""
        with ExitStack() as closing:  # ends all of them, even if one raises
            closing.callback(self.caches.close)
            for state in [*self._waiting, *self._running]:
                closing.callback(self._finish, state)
        self._waiting.clear()

    def stream(self, state: RequestState) -> Generator[int, None, None]:
        """Yield the new tokens of a request as they are verified; raise its error.

        Closing the generator aborts the request: the tokens taken by then are its output.
        """
        taken = 0
        try:
            while not state.is_finished:
                self.step()
                while taken < len(state.tokens):
                    taken += 1
                    yield state.tokens[taken - 1]
            if state.error is not None:
                raise state.error
        finally:
            del state.tokens[taken:]
            self.abort(state)

    def run(
        self, requests: Iterable[Request], concurrency: int
    ) -> Generator[RequestState, None, None]:
        """Yield each request as it finishes; up to `concurrency` share memory and forwards.

        A request is taken when there is room for it. One that does not fit its share of the memory
        runs alone at the end.
        """
        too_large: list[Request] = []
        self.concurrency = concurrency
        try:
            for state in self._run(iter(requests)):
                if concurrency > 1 and isinstance(state.error, InsufficientMemoryError):
                    too_large.append(state.request)
                else:
                    yield state
            self.concurrency = 1
            yield from self._run(iter(too_large))
        finally:
            self.concurrency = 1
            self.close()

    def _run(self, requests: Iterator[Request]) -> Iterator[RequestState]:
        while True:
            if len(self._running) < self.concurrency:
                with self._clock.paused():
                    request = next(requests, None)
                if request is not None:
                    self.add(request)
                elif not self._running:
                    return
            yield from [state for state in self.step() if state.is_finished]

    def _admit(self) -> list[RequestState]:
        """Prefill the requests that there is room for; return them."""
        admitted = list[RequestState]()
        while self._waiting and len(self._running) < self.concurrency:
            state = self._waiting.popleft()
            admitted.append(state)
            with self._clock.paused(), self._own_errors([state]):
                started = time.perf_counter()
                state.request.validate(self.context, self.sessions.runtime.target.config.vocab)
                state.status = Status.PREFILLING
                self._running.append(state)
                for each in self._running:
                    each.stats.concurrency = max(each.stats.concurrency, len(self._running))
                logits = self.caches.prefill(state, self.concurrency)
                tokens = state.begin(logits, self.lengths, self._clock, started)
                self._advance(state, tokens)
        return admitted

    def _forward(self) -> list[RequestState]:
        """Run the innermost forwards that requests wait for, as one; return these requests.

        Requests that are ahead wait until all need a forward of the same level, so that the outer
        ones, which cost most, are shared by all.
        """
        if not self._running:
            return []
        depth = max(state.depth for state in self._running)
        waiting = [state for state in self._running if state.depth == depth]
        model = waiting[0].forward.model
        batch = [state for state in waiting if state.forward.model is model]
        outputs: Sequence[Tensor] = []
        with self._own_errors(batch):
            outputs = self.sessions.executor.forward([state.forward for state in batch])
        for state, logits in zip(batch, outputs, strict=False):  # no outputs after an error
            with self._own_errors([state]):
                if (tokens := state.feed(logits)) is not None:
                    self._advance(state, tokens)
        return batch

    def _advance(self, state: RequestState, tokens: list[int]) -> None:
        """Give a request the tokens of a round, and end it with its last one."""
        if state.advance(tokens, self.stop_tokens):
            return
        stats = state.stats
        assert state.sequence is not None
        caches = state.sequence.caches
        # timings of shared offloaded rounds do not show what one request alone would cost
        if stats.concurrency == 1 or not caches.uses_link:
            self.sessions.record(caches, stats.rounds)
        self._finish(state, keep=True)

    def _finish(self, state: RequestState, keep: bool = False) -> None:
        """End a request, and free its caches; `keep`: a later request may continue them."""
        if state in self._running:
            self._running.remove(state)
        sequence = state.finish(keep)
        try:
            if sequence is not None:
                self.caches.release(sequence, keep)
        finally:
            state.stats.release()

    @contextmanager
    def _own_errors(self, states: Sequence[RequestState]) -> Iterator[None]:
        """End requests with an error of their own. Raises errors that end all requests."""
        try:
            yield
        except Exception as error:
            if isinstance(error, RankLost):
                raise
            if isinstance(error, TierForceError):
                own = error
            elif self.sessions.group.size == 1 and is_out_of_memory(error):
                own = InsufficientMemoryError(f"out of memory: {one_line(error)}")
            else:  # other ranks may be in the middle of the same forward and cannot continue
                raise
            for state in states:
                state.error = own
                self._finish(state)
