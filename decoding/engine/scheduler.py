"""Several texts at once: where they wait for passes of one model, these are made as one.

A pass reads all weights of its model, however few its tokens are. Texts that share it read them
once. Texts join and leave between passes (continuous batching, Yu et al. 2022, Orca, section 4.1),
each with its own caches, generator and counts.
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
    """What has come of a request so far, and at last."""

    request: Request
    stats: Stats = field(default_factory=Stats)
    tokens: list[int] = field(default_factory=list)
    error: TierForceError | None = None  # why there will be no more


class _Running:
    """A text whose session is open: it waits for its prompt to be read, then pass after pass."""

    passes: Steps[list[int]]  # of the round that is under way
    asked: ForwardRequest

    def __init__(self, written: Completion, writing: Generation):
        self.written, self.writing = written, writing

    @property
    def depth(self) -> int:
        """Return how far inside its hierarchy the text waits; at the target it is 0."""
        levels = self.writing.session.levels
        return [level.cache for level in levels].index(self.asked.cache)


class Scheduler:
    """Texts that are written together, on rank 0; the other ranks follow its passes."""

    def __init__(
        self,
        sessions: SequenceManager,
        context: int,
        stop_tokens: frozenset[int],
        lengths: dict[str, Lengths],
        concurrency: int,
    ):
        """Write texts of at most `context` tokens, `concurrency` of which share the memory.

        `lengths` are the draft lengths by mode: all texts share them and learn from all.
        """
        self.sessions, self.context, self.stop_tokens = sessions, context, stop_tokens
        self.lengths, self.concurrency = lengths, concurrency
        self.clock = Clock()
        self._running: list[_Running] = []
        self._alone: list[Request] = []  # what memory did not do for beside others

    def run(self, requests: Iterable[Request]) -> Generator[Completion, None, None]:
        """Yield each text as it is done, or has failed: one that fails leaves the others alone.

        A request is taken when there is room for it. One that does not fit its share of the memory
        is written alone at the end. Raises RankLost.
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
            while self._alone:
                yield from self._join(Completion(self._alone.pop(0)), 1)
                while self._running:
                    yield from self._step()
        finally:
            sessions = [running.writing.session for running in self._running]
            self._running = []
            with ExitStack() as closing:  # all of them, whatever one raises
                for session in sessions:
                    closing.callback(self.sessions.close, session)

    def _join(self, written: Completion, concurrency: int) -> Iterator[Completion]:
        """Open a text and read its prompt; yield it where there is no more to come."""
        with self.clock.paused():
            yield from self._joined(written, concurrency)

    def _joined(self, written: Completion, concurrency: int) -> Iterator[Completion]:
        request, started = written.request, time.perf_counter()
        is_alone = concurrency == 1
        try:
            request.validate(self.context, self.sessions.runtime.target.config.vocab)
            session = self.sessions.open(
                request.prompt, request.max_new_tokens, concurrency, request.name
            )
        except Exception as error:
            yield from self._failed(written, error, is_alone)
            return
        running = _Running(written, Generation(request, session, written.stats, started))
        self._running.append(running)
        for each in self._running:
            count = max(each.written.stats.concurrency, len(self._running))
            each.written.stats.concurrency = count
        try:
            logits = session.prefill(request.progress)
            new = running.writing.sample_first(self.lengths, logits, self.clock)
            is_going_on = self._next_round(running, new)
        except Exception as error:
            self._end(running)
            yield from self._failed(written, error, is_alone)
            return
        if not is_going_on:
            yield self._end(running)

    def _step(self) -> Iterator[Completion]:
        """Make the innermost passes that texts wait for, as one; yield the texts that are done.

        So texts that are ahead wait until all stand before a pass of the same level, and the outer
        ones, which cost most, are shared by all.
        """
        depth = max(running.depth for running in self._running)
        waiting = [running for running in self._running if running.depth == depth]
        model = waiting[0].asked.model
        together = [running for running in waiting if running.asked.model is model]
        try:
            answers = self.sessions.executor([running.asked for running in together])
        except Exception as error:  # a pass that is left half made is not made again
            is_alone = self._is_alone()
            for running in together:
                self._end(running)
            for running in together:
                yield from self._failed(running.written, error, is_alone)
            return
        over: list[Completion] = []
        for running, logits in zip(together, answers, strict=True):
            try:
                is_going_on = self._feed(running, logits)
            except Exception as error:
                is_alone = self._is_alone()
                self._end(running)
                over += self._failed(running.written, error, is_alone)
            else:
                if not is_going_on:
                    over.append(self._end(running))
        yield from over

    def _feed(self, running: _Running, logits: Tensor) -> bool:
        """Give a text the logits it waits for; return whether it goes on."""
        try:
            running.asked = running.passes.send(logits)
        except StopIteration as over:
            return self._next_round(running, over.value)
        return True

    def _next_round(self, running: _Running, new: list[int]) -> bool:
        """Take a round's tokens and begin the next one; return whether there is one."""
        writing = running.writing
        running.written.tokens += writing.generate(new, self.stop_tokens)
        if writing.is_done:
            # rounds that others shared say nothing of what this text would cost alone over a link
            if writing.stats.concurrency == 1 or not writing.session.uses_link:
                self.sessions.record(writing.session, writing.stats.rounds)
            return False
        running.passes = writing.round()
        running.asked = next(running.passes)
        return True

    def _end(self, running: _Running) -> Completion:
        """Close a text and let go of its caches; return what has come of it."""
        self._running.remove(running)
        self.sessions.close(running.writing.session)
        running.written.stats.release()
        return running.written

    def _is_alone(self) -> bool:
        """Return whether one text has all the memory to itself."""
        return len(self._running) == 1

    def _failed(
        self, written: Completion, error: Exception, is_alone: bool
    ) -> Iterator[Completion]:
        """Yield a text with what ended it, or put it aside to be written alone.

        Raises what ends all texts.
        """
        own = self._request_error(error)
        if isinstance(own, InsufficientMemoryError) and not is_alone:
            self._alone.append(written.request)
            return
        written.error = own
        yield written

    def _request_error(self, error: Exception) -> TierForceError:
        """Return what ends one text alone. Raises what ends all of them."""
        if not isinstance(error, TierForceError):
            if self.sessions.group.size > 1 or not is_out_of_memory(error):
                # other ranks are in the middle of the same pass: there is no going on together
                raise error
            error = InsufficientMemoryError(f"out of memory: {one_line(error)}")
        if isinstance(error, RankLost):
            raise error
        return error
