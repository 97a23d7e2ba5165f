"""Continuous batching: concurrent requests that wait for the same model share one forward.

A forward reads all weights of its model, however few its tokens are; requests that share it read
them once. Requests join and leave between forwards (Yu et al. 2022, Orca, section 4.1), each with
its own caches, generator and counts.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from torch import Tensor

from decoding.engine.generation import Generation
from decoding.engine.request import Request
from decoding.engine.session_manager import SequenceManager
from decoding.engine.stats import Stats
from decoding.speculation.coroutines import Clock, Steps
from decoding.speculation.draft_length import Lengths
from offload.errors import InsufficientMemoryError, TierForceError, is_out_of_memory, one_line
from parallel.execution.batched_forward import ForwardRequest
from parallel.ranks.environment import RankLost


@dataclass
class Completion:
    """The output of a request so far, and its final state."""

    request: Request
    stats: Stats = field(default_factory=Stats)
    tokens: list[int] = field(default_factory=list)
    error: TierForceError | None = None  # set if the request failed


class _Running:
    """A request with an open sequence, which waits for its prefill, then for one forward a time."""

    steps: Steps[list[int]]  # the current round
    forward: ForwardRequest  # the forward it waits for

    def __init__(self, completion: Completion, generation: Generation):
        self.completion, self.generation = completion, generation

    @property
    def depth(self) -> int:
        """Return the index of the level that waits for a forward; the target is 0."""
        levels = self.generation.session.levels
        return [level.cache for level in levels].index(self.forward.cache)


class Scheduler:
    """Runs concurrent requests on rank 0; the other ranks take part in its forwards."""

    def __init__(
        self,
        sessions: SequenceManager,
        context: int,
        stop_tokens: frozenset[int],
        lengths: dict[str, Lengths],
        concurrency: int,
    ):
        """Run sequences of at most `context` tokens, `concurrency` of which share the memory.

        `lengths` are the draft lengths by mode: all requests share them and adapt them.
        """
        self.sessions, self.context, self.stop_tokens = sessions, context, stop_tokens
        self.lengths, self.concurrency = lengths, concurrency
        self.clock = Clock()
        self._running: list[_Running] = []
        self._too_large: list[Request] = []  # those that need all of the memory

    def run(self, requests: Iterable[Request]) -> Generator[Completion, None, None]:
        """Yield each completion as it finishes or fails; a failure does not affect the others.

        A request is taken when there is room for it. One that does not fit its share of the memory
        runs alone at the end. Raises RankLost.
        """
        waiting = iter(requests)
        try:
            while True:
                while len(self._running) < self.concurrency:
                    with self.clock.paused():
                        request = next(waiting, None)
                    if request is None:
                        break
                    yield from self._join(Completion(request), self.concurrency)
                if not self._running:
                    break
                yield from self._step()
            while self._too_large:
                yield from self._join(Completion(self._too_large.pop(0)), 1)
                while self._running:
                    yield from self._step()
        finally:
            sessions = [running.generation.session for running in self._running]
            self._running = []
            with ExitStack() as closing:  # closes all of them, even if one raises
                for session in sessions:
                    closing.callback(self.sessions.close, session)

    def _join(self, completion: Completion, concurrency: int) -> Iterator[Completion]:
        """Open a sequence and prefill its prompt; yield the completion if it is already over."""
        with self.clock.paused():
            yield from self._prefill(completion, concurrency)

    def _prefill(self, completion: Completion, concurrency: int) -> Iterator[Completion]:
        request = completion.request
        started = time.perf_counter()
        is_alone = concurrency == 1
        try:
            request.validate(self.context, self.sessions.runtime.target.config.vocab)
            session = self.sessions.open(
                request.prompt, request.max_new_tokens, concurrency, request.name
            )
        except Exception as error:
            yield from self._fail(completion, error, is_alone)
            return
        running = _Running(completion, Generation(request, session, completion.stats, started))
        self._running.append(running)
        for each in self._running:
            count = max(each.completion.stats.concurrency, len(self._running))
            each.completion.stats.concurrency = count
        try:
            logits = session.prefill(request.progress)
            tokens = running.generation.sample_first(self.lengths, logits, self.clock)
            is_running = self._next_round(running, tokens)
        except Exception as error:
            self._end(running)
            yield from self._fail(completion, error, is_alone)
            return
        if not is_running:
            yield self._end(running)

    def _step(self) -> Iterator[Completion]:
        """Run the innermost forwards that requests wait for, as one; yield finished completions.

        Requests that are ahead wait until all need a forward of the same level, so that the outer
        ones, which cost most, are shared by all.
        """
        depth = max(running.depth for running in self._running)
        waiting = [running for running in self._running if running.depth == depth]
        model = waiting[0].forward.model
        batch = [running for running in waiting if running.forward.model is model]
        try:
            outputs = self.sessions.executor.forward([running.forward for running in batch])
        except Exception as error:  # an interrupted forward cannot be resumed
            is_alone = self._is_alone()
            for running in batch:
                self._end(running)
            for running in batch:
                yield from self._fail(running.completion, error, is_alone)
            return
        finished: list[Completion] = []
        for running, logits in zip(batch, outputs, strict=True):
            try:
                is_running = self._feed(running, logits)
            except Exception as error:
                is_alone = self._is_alone()
                self._end(running)
                finished += self._fail(running.completion, error, is_alone)
            else:
                if not is_running:
                    finished.append(self._end(running))
        yield from finished

    def _feed(self, running: _Running, logits: Tensor) -> bool:
        """Send a request the logits it waits for; return whether it continues."""
        try:
            running.forward = running.steps.send(logits)
        except StopIteration as end:
            return self._next_round(running, end.value)
        return True

    def _next_round(self, running: _Running, tokens: list[int]) -> bool:
        """Add a round's tokens and start the next round; return whether there is one."""
        generation = running.generation
        running.completion.tokens += generation.emit(tokens, self.stop_tokens)
        if generation.is_done:
            # timings of shared offloaded rounds do not show what one request alone would cost
            if generation.stats.concurrency == 1 or not generation.session.uses_link:
                self.sessions.record(generation.session, generation.stats.rounds)
            return False
        running.steps = generation.round()
        running.forward = next(running.steps)
        return True

    def _end(self, running: _Running) -> Completion:
        """Close a sequence and free its caches; return its completion."""
        self._running.remove(running)
        self.sessions.close(running.generation.session)
        running.completion.stats.release()
        return running.completion

    def _is_alone(self) -> bool:
        """Return whether one request has all the memory to itself."""
        return len(self._running) == 1

    def _fail(
        self, completion: Completion, error: Exception, is_alone: bool
    ) -> Iterator[Completion]:
        """Yield a completion with its error, or postpone the request to run it alone.

        Raises errors that end all requests.
        """
        own = self._request_error(error)
        if isinstance(own, InsufficientMemoryError) and not is_alone:
            self._too_large.append(completion.request)
            return
        completion.error = own
        yield completion

    def _request_error(self, error: Exception) -> TierForceError:
        """Return an error that ends one request. Raises errors that end all of them."""
        if not isinstance(error, TierForceError):
            if self.sessions.group.size > 1 or not is_out_of_memory(error):
                # other ranks are in the middle of the same forward and cannot continue
                raise error
            error = InsufficientMemoryError(f"out of memory: {one_line(error)}")
        if isinstance(error, RankLost):
            raise error
        return error
