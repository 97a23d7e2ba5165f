"""Several texts at once: where they wait for passes of one model, these are made as one.

A pass reads all weights of its model, however few its tokens are. Texts that share it read them
once. Texts join and leave between passes (continuous batching, Yu et al. 2022, Orca, section 4.1),
each with its own caches, generator and counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from decoding.session import Lengths
from decoding.sessions import Sessions
from decoding.speculation.passes import Passes
from decoding.stats import Stats
from decoding.writing import Request, Writing
from offload.errors import FitError, TierForceError, is_out_of_memory, one_line
from parallel.environment import RankLost
from parallel.passes import Pass


@dataclass
class Written:
    """What has come of a request so far, and at last."""

    request: Request
    stats: Stats = field(default_factory=Stats)
    tokens: list[int] = field(default_factory=list)
    error: TierForceError | None = None  # why there will be no more


class _Running:
    """A text whose round is under way: it waits for the pass it has asked for."""

    passes: Passes[list[int]]
    asked: Pass

    def __init__(self, written: Written, writing: Writing):
        self.written, self.writing = written, writing

    @property
    def depth(self) -> int:
        """Return how far inside its hierarchy the text waits; at the target it is 0."""
        levels = self.writing.session.levels
        return next(at for at, level in enumerate(levels) if level.cache is self.asked.cache)


class Batch:
    """Texts that are written together, on rank 0; the other ranks follow its passes."""

    def __init__(
        self,
        sessions: Sessions,
        context: int,
        stop_tokens: frozenset[int],
        lengths: dict[str, Lengths],
        at_once: int,
    ):
        """Write up to `at_once` texts together, each of at most `context` tokens.

        `lengths` are the draft lengths by mode: all texts share them and learn from all.
        """
        self.sessions, self.context, self.stop_tokens = sessions, context, stop_tokens
        self.lengths, self.at_once = lengths, at_once
        self._running: list[_Running] = []

    def write(self, requests: Iterable[Request]) -> Iterator[Written]:
        """Yield each text as it is done, or has failed: one that fails leaves the others alone.

        A request is taken when there is room for it. Raises RankLost.
        """
        waiting = iter(requests)
        more = True
        try:
            while more or self._running:
                while more and len(self._running) < self.at_once:
                    request = next(waiting, None)
                    more = request is not None
                    if request is not None and (done := self._join(request)):
                        yield done
                if self._running:
                    yield from self._step()
        finally:
            for running in self._running:
                self.sessions.close(running.writing.session)
            self._running = []

    def _join(self, request: Request) -> Written | None:
        """Open a text and read its prompt; return it where there is no more to come."""
        started = time.perf_counter()
        written = Written(request)
        vocab = self.sessions.runtime.target.config.vocab
        try:
            request.refuse_senseless(self.context, vocab)
            session = self.sessions.open(request.prompt, request.new, self.at_once)
        except Exception as error:
            written.error = self._own(error)
            return written
        written.stats.texts_at_once = self.at_once
        running = _Running(written, Writing(request, session, written.stats, started))
        try:
            is_going_on = self._next_round(running, running.writing.begin(self.lengths))
        except Exception as error:
            is_going_on = False
            written.error = self._own(error)
        if not is_going_on:
            self.sessions.close(session)
            return written
        self._running.append(running)
        return None

    def _step(self) -> list[Written]:
        """Make the innermost passes that texts wait for, as one; return the texts that are done.

        So texts that are ahead wait until all stand before a pass of the same level, and the outer
        ones, which cost most, are shared by all.
        """
        depth = max(running.depth for running in self._running)
        waiting = [running for running in self._running if running.depth == depth]
        model = waiting[0].asked.model
        together = [running for running in waiting if running.asked.model is model]
        done = []
        for running, logits in zip(together, self._make(together), strict=True):
            try:
                is_going_on = self._answer(running, logits)
            except Exception as error:
                is_going_on = False
                running.written.error = self._own(error)
            if not is_going_on:
                self._running.remove(running)
                self.sessions.close(running.writing.session)
                done.append(running.written)
        return done

    def _answer(self, running: _Running, logits: Tensor | Exception) -> bool:
        """Give a text the logits it waits for; return whether it goes on."""
        if isinstance(logits, Exception):
            raise logits
        try:
            running.asked = running.passes.send(logits)
        except StopIteration as over:
            return self._next_round(running, over.value)
        return True

    def _next_round(self, running: _Running, new: list[int]) -> bool:
        """Take a round's tokens and begin the next one; return whether there is one."""
        writing = running.writing
        running.written.tokens += writing.write(new, self.stop_tokens)
        if writing.is_done:
            self.sessions.record(writing.session, writing.stats.rounds)
            return False
        running.passes = writing.round()
        running.asked = next(running.passes)
        return True

    def _make(self, together: Sequence[_Running]) -> Sequence[Tensor | Exception]:
        """Return the logits of these passes, made as one; or one by one where memory runs out."""
        passes = [running.asked for running in together]
        try:
            return self.sessions.lockstep(passes)
        except (RuntimeError, MemoryError) as error:
            self._own(error)
            if len(together) == 1:
                return [error]
        return [logits for running in together for logits in self._make([running])]

    def _own(self, error: Exception) -> TierForceError:
        """Return what ends one text alone; raise what ends all."""
        if isinstance(error, TierForceError) and not isinstance(error, RankLost):
            return error
        if self.sessions.group.size > 1 or not is_out_of_memory(error):
            # other ranks are in the middle of the same pass: there is no going on together
            raise error
        return FitError(f"out of memory: {one_line(error)}")
