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

from decoding.engine.cache_pool import CachePool
from decoding.engine.request import Request, RequestState, Status
from decoding.engine.session_manager import SequenceManager
from decoding.speculation.coroutines import Clock
from decoding.speculation.draft_length import Lengths
from offload.errors import InsufficientMemoryError
from parallel.execution.forwards import Forwards, Outputs, own_error

_MAX_WAIT_S = 1.0  # longest wait of the oldest prefill while shorter ones come first


class Scheduler:
    """Runs requests on rank 0; the other ranks take part in their forwards.

    A request that fails ends with its error, and the others continue. One that does not fit its
    share of the memory runs alone, when no other is running. An error of the program, or a lost
    rank, ends all of them.
    """

    def __init__(self, sessions: SequenceManager, context: int, stop_tokens: frozenset[int]):
        """Run sequences of at most `context` tokens, which `sessions` opens on all ranks."""
        self.stop_tokens = stop_tokens
        self.lengths: dict[str, Lengths] = {}  # draft lengths by mode, adapted over all requests
        self.caches = CachePool(sessions, context)
        self.concurrency = 1  # requests that share the memory
        self._clock = Clock()
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []  # and those being prefilled
        self._is_batch = False  # in `run`
        self._forwards = Forwards[RequestState](sessions.executor, self._own_errors)
        self._lead_s = 0.0  # seconds of prefill less those of forwards, while both are due

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
        """Admit requests that there is room for; run one step of a prefill, or one forward.

        Prefill and the forwards of running requests each get half of the time, except in `run`,
        where forwards wait. Returns the requests that may have new tokens, or have finished.
        Raises errors that end all requests; all caches are freed then.
        """
        is_interleaved = not self._is_batch
        try:
            if failed := self._admit():
                return failed
            started, prefilling = time.perf_counter(), self._prefilling
            have_turns = is_interleaved and 0 < len(prefilling) < len(self._running)
            is_forward = not prefilling or (have_turns and self._lead_s > 0)
            if is_forward:
                stepped = [each for each in self._running if each.status is Status.RUNNING]
                self._feed(self._forwards.step(stepped))
            else:
                in_chunks = is_interleaved and self.concurrency > 1
                stepped = self._prefill(prefilling, in_chunks, have_turns)
            seconds = time.perf_counter() - started
            self._lead_s += -seconds if is_forward else seconds
            if not have_turns:
                self._lead_s = 0.0
            return stepped
        except BaseException:
            self.close()  # an interrupted forward cannot be resumed
            raise

    def abort(self, state: RequestState) -> None:
        """End a request between two steps, unless it has finished."""
        if state in self._waiting:
            self._waiting.remove(state)
        if state.status is Status.RUNNING:
            try:
                outputs = self._forwards.complete(state)
                self._feed([each for each in outputs if each[0] is not state])
            except BaseException:
                self.close()
                raise
        if not state.is_finished:
            self._finish(state, keep=state.status is Status.RUNNING)

    def close(self) -> None:
        """End all requests, and free all caches."""
        waiting = list(self._waiting)
        self._waiting.clear()
        with ExitStack() as closing:  # ends all of them, even if one raises
            closing.callback(self.caches.close)
            for state in [*waiting, *self._running]:
                closing.callback(self._finish, state)

    def run(
        self, requests: Iterable[Request | None], concurrency: int
    ) -> Generator[RequestState, None, None]:
        """Yield each request as it finishes; up to `concurrency` share memory and forwards.

        A request is taken when there is room for it, and prefilled at once: the others' forwards
        wait until they are shared. None in place of a request defers it to the next step. Those
        that do not fit their share of the memory run alone at the end.
        """
        self.concurrency, self._is_batch = concurrency, True
        rest = iter(requests)
        try:
            while True:
                if len(self._running) < self.concurrency and not self._prefilling:
                    with self._clock.paused():
                        request = next(rest, None)
                    if request is not None:
                        self.add(request)
                    elif not self.is_busy:
                        return
                yield from [state for state in self.step() if state.is_finished]
        finally:
            self.concurrency, self._is_batch = 1, False
            self.close()

    @property
    def _prefilling(self) -> list[RequestState]:
        return [state for state in self._running if state.status is Status.PREFILLING]

    def _admit(self) -> list[RequestState]:
        """Give caches to the requests that there is room for; return those that failed."""
        admitted = list[RequestState]()
        while (state := self._next()) is not None:
            self._waiting.remove(state)
            admitted.append(state)
            with self._clock.paused(), self._own_errors([state]):
                vocab = self.caches.sessions.runtime.target.config.vocab
                state.request.validate(self.caches.context, vocab)
                state.status, state.stepped_at = Status.PREFILLING, time.perf_counter()
                self._running.append(state)
                self.caches.begin(state, 1 if state.runs_alone else self.concurrency)
                for each in self._running:
                    each.stats.concurrency = max(each.stats.concurrency, len(self._running))
        return [state for state in admitted if state.is_finished]

    def _next(self) -> RequestState | None:
        """Return the next request to admit.

        One that runs alone waits for the others to end, and those that come later wait for it; in
        `run`, it waits for these too. A request also waits for a prefill that it has use for.
        """
        running, waiting = self._running, list(self._waiting)
        if len(running) >= self.concurrency or any(state.runs_alone for state in running):
            return None
        if self.caches.is_blocked:
            return None
        if self._is_batch:
            waiting.sort(key=lambda state: state.runs_alone)
        for state in waiting:
            if state.runs_alone:
                return None if running else state
            if not (self._prefilling and self.caches.is_worth_waiting(state.request)):
                return state
        return None

    def _prefill(
        self, prefilling: list[RequestState], in_chunks: bool, waits: bool
    ) -> list[RequestState]:
        """Run the next step of a prefill, a chunk of a layer or all of it; return its request.

        The one that misses least comes first, unless the oldest has waited for too long.
        """
        state, oldest = min(prefilling, key=lambda each: each.missing), prefilling[0]
        if oldest.idle_s > _MAX_WAIT_S:
            state = oldest
        with self._clock.paused(), self._own_errors([state]):
            logits = self.caches.prefill(state, not in_chunks, waits)
            state.stepped_at = time.perf_counter()
            if logits is not None:
                self._advance(state, state.begin(logits, self.lengths, self._clock))
        return [state]

    def _feed(self, outputs: Outputs[RequestState]) -> None:
        """Give requests the logits that they waited for."""
        for state, logits in outputs:
            with self._own_errors([state]):
                if (tokens := state.feed(logits)) is not None:
                    self._advance(state, tokens)

    def _advance(self, state: RequestState, tokens: list[int]) -> None:
        """Give a request the tokens of a round, and end it with its last one."""
        if state.advance(tokens, self.stop_tokens):
            return
        stats = state.stats
        assert state.sequence is not None
        caches = state.sequence.caches
        # timings of shared offloaded rounds do not show what one request alone would cost
        if stats.concurrency == 1 or not caches.plan.uses_link:
            self.caches.sessions.record(caches, stats.rounds, stats.concurrency)
        self._finish(state, keep=True)

    def _finish(self, state: RequestState, keep: bool = False) -> None:
        """End a request, and free its caches; `keep`: a later request may continue them."""
        if state in self._running:
            self._running.remove(state)
        self._forwards.forget(state)
        is_announced = self._is_batch and state.request.room is not None
        keep = keep and (self.caches.room is not None or is_announced)
        sequence = state.finish(keep)
        try:
            self.caches.cancel(state)
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
            own = own_error(error, self.caches.sessions.group.size)
            if own is None:
                raise
            is_shared = isinstance(own, InsufficientMemoryError) and self.concurrency > 1
            for state in states:
                is_unseen = self._is_batch or not state.tokens  # no token of it is shown yet
                may_retry = is_shared and is_unseen and not state.runs_alone
                size = len(state.request.prompt), state.request.max_new_tokens
                if may_retry and self.caches.sessions.planner.fits(
                    *size, self.caches.sessions.memory.whole
                ):
                    self._finish(state)
                    state.restart_alone()
                    # before all but those that run alone, too
                    index = sum(each.runs_alone for each in self._waiting)
                    self._waiting.insert(index, state)
                else:
                    state.error = own
                    self._finish(state)
