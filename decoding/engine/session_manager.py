"""Sessions, opened on all ranks together: each text's memory is planned, then allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor

from decoding.engine.session import SequenceState
from decoding.models.runtime import Runtime
from decoding.planning.fit import Memory, closest_infeasible, feasible_plans, fit, min_budget
from decoding.planning.measured_cost import MeasuredCosts
from decoding.planning.memory_plan import MemoryPlan
from decoding.planning.memory_requirements import Strategy
from decoding.planning.strategy_selector import StrategyChoice, StrategySelector
from decoding.speculation.draft_length import RoundStats
from offload.errors import InsufficientMemoryError, TierForceError
from offload.memory.host_arena import HostArena
from parallel.execution.executor import TensorParallelExecutor
from parallel.model.transformer import Progress
from parallel.ranks.process_group import TensorParallelGroup


@dataclass(frozen=True)
class _Nothing:
    """What rank 0 tells the others while no text is opened."""


@dataclass(frozen=True)
class _Opening:
    """What rank 0 tells the others of a text that is opened."""

    prompt: list[int]
    new: int
    concurrency: int  # texts that share the memory, this one among them
    name: str  # that people know it by


class SequenceManager:
    """The sessions of texts on the same models, each on all ranks or on none."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.group: TensorParallelGroup = runtime.target.group
        rate, prior = None, None
        if runtime.requirements.has_choice:
            rate = runtime.link_rate()
            with self.group.sync_errors():
                prior = runtime.prior(rate)
        self.selector = StrategySelector(MeasuredCosts(rate), prior)
        self.executor = TensorParallelExecutor(self.group)
        self._arenas = [runtime.arena]  # one for each text that was open at once
        self._free = Memory(0, 0)  # what there was when no text was open
        self.prefix_cache = runtime.prefix_cache()

    def plan(self, prompt: int, new: int, concurrency: int = 1) -> MemoryPlan:
        """Plan a text of that many tokens as `open` would now; this rank's plan.

        All ranks call it. Raises InsufficientMemoryError, on all ranks, when the text would not fit.
        """
        memory = self._memory().divided(concurrency)
        with self.group.sync_errors():
            plans = feasible_plans(self.runtime.requirements, memory, prompt, new)
        if self.runtime.requirements.has_choice and not self._common(plans):
            raise InsufficientMemoryError(
                "no one mode and retrieval budget fit all ranks: set `mode` and `retrieval_budget`, or free "
                "memory on the fullest GPU."
            )
        choice = self.select_strategy(prompt, new, memory)
        with self.group.sync_errors():
            return fit(
                self.runtime.with_strategy(choice.strategy).requirements, memory, prompt, new
            )

    def max_fitting(self, prompt: int, new: int, most: int) -> int:
        """Return how many such texts, at most `most`, are each planned as they would be alone.

        All ranks call it. Raises InsufficientMemoryError, on all ranks, when one alone would not fit.
        """
        alone = self.plan(prompt, new)
        for count in range(2, most + 1):
            try:
                shared = self.plan(prompt, new, count)
            except InsufficientMemoryError:
                return count - 1
            if any(self.group.gather(shared != alone)):
                return count - 1
        return max(1, most)

    def select_strategy(
        self, prompt: int, new: int, memory: Memory | None = None
    ) -> StrategyChoice:
        """Choose a text's mode and retrieval budget, the same on all ranks.

        `memory` is this rank's, by default what there is. What fits nowhere is left to `open` to
        refuse.
        """
        needs = self.runtime.requirements
        if not needs.has_choice:
            return StrategyChoice(needs.strategy, "set")
        memory = memory or self._memory()
        refused = Strategy(needs.mode, min_budget(needs))
        try:
            plans = feasible_plans(needs, memory, prompt, new)
        except InsufficientMemoryError:
            plans = {}
            refused = closest_infeasible(needs, memory, prompt, new) or refused
        if not (common := self._common(plans)):
            return self.group.broadcast(StrategyChoice(refused, "nothing fits"))
        return self.group.broadcast(self.selector.select(needs, common, prompt, memory.concurrency))

    def open(
        self, prompt: Sequence[int], new: int, concurrency: int = 1, name: str = ""
    ) -> SequenceState:
        """Begin a text on all ranks: allocate what it takes in the way that is chosen; for rank 0.

        It gets an equal share of the memory that there is. Prefill is to follow, and `close` to end
        it. `name` is what people call it where it is kept on disk. Raises InsufficientMemoryError, on all ranks.
        """
        self.executor.broadcast_open()
        return self._open(self.group.broadcast(_Opening(list(prompt), new, concurrency, name)))

    def cached_prefix(self, prompt: Sequence[int], new: int) -> int:
        """Return how many tokens of a prompt need not be read, for they are kept; for rank 0."""
        if self.prefix_cache is None:
            return 0
        return self.prefix_cache.find(self._identity(prompt, new), prompt)

    def is_cached(self, prompt: Sequence[int], new: int) -> bool:
        """Return whether a prompt is kept, or nearly all of it; for rank 0."""
        return self.prefix_cache is not None and self.prefix_cache.has(
            self._identity(prompt, new), prompt
        )

    def _identity(self, prompt: Sequence[int], new: int) -> str:
        assert self.prefix_cache is not None
        config, tokens = self.runtime.target.config, len(prompt)
        return self.prefix_cache.identity.of_text(config, tokens, tokens + new)

    def extend(
        self,
        session: SequenceState,
        tokens: Sequence[int],
        kept: int,
        rooms: Sequence[int],
        progress: Progress | None = None,
    ) -> Tensor:
        """Read an open text on, on all ranks, as `Session.extend` does; for rank 0."""
        self.executor.broadcast_extend(session, tokens, kept, rooms)
        return session.extend(tokens, kept, rooms, progress)

    def close(self, session: SequenceState) -> None:
        """End a text on all ranks; for rank 0."""
        try:
            self.executor.broadcast_close(session)
        except TierForceError:
            _cancel(session)
            raise
        finally:
            self.executor.close(session)

    def keep_alive(self) -> None:
        """Let the other ranks go on waiting for what rank 0 does next: they do so for hours only.

        For rank 0, between two passes.
        """
        if self.executor.sequences:
            self.executor.broadcast_idle()
        else:
            self.group.broadcast(_Nothing())

    def record(self, session: SequenceState, rounds: list[RoundStats]) -> None:
        """Learn from a text that is done what the next one's mode and budget may go by."""
        self.selector.record(
            session.runtime.requirements, session.plan, len(session.prompt), rounds
        )

    def run_worker(self) -> bool:
        """Take part in the text that rank 0 begins, and in those it begins before that is over.

        For the other ranks. Returns whether there was one: rank 0 may have closed the engine.
        """
        if not self._follow_one():
            return False
        try:
            while self.executor.sequences:
                over = self.executor.worker_loop()
                if over is None:
                    self._follow_one()
                else:
                    self.executor.close(over)
        except BaseException:
            for each in self._sessions():
                _cancel(each)
            raise
        finally:
            for text in list(self.executor.sequences):
                self.executor.close(text)
        return True

    def _follow_one(self) -> bool:
        """Open what rank 0 opens, and read its prompt; return whether there is anything."""
        request: _Opening | _Nothing | None = _Nothing()
        while isinstance(request, _Nothing):
            request = self.group.broadcast(request)
        if request is None:
            return False
        # raised on rank 0 too, which tells
        with suppress(TierForceError):
            self._open(request).prefill()
        return True

    def _open(self, request: _Opening) -> SequenceState:
        prompt, new = request.prompt, request.new
        if not self.executor.sequences:
            self._count_arenas(request.concurrency)
        self._count_memory()
        memory = self._free.divided(request.concurrency)
        choice = self.select_strategy(len(prompt), new, memory)
        runtime = self.runtime.with_strategy(choice.strategy)
        with self.group.sync_errors():
            plan = runtime.plan(len(prompt), new, memory)
        with self.group.sync_errors():
            runtime = replace(runtime, arena=self._free_arena())
            session = SequenceState(
                runtime, prompt, new, choice, plan, self.prefix_cache, request.name
            )
        session.extend_chunk = min(self.group.gather(session.extend_chunk))
        self.executor.add(session)
        return session

    def _count_arenas(self, texts: int) -> None:
        """Keep one for each text."""
        for arena in self._arenas[texts:]:
            arena.free()
        del self._arenas[texts:]

    def _count_memory(self) -> None:
        """Take note of the memory there is where no text is open.

        Where some are, it is no more than what they may take and what is free now.
        """
        now = self._memory()
        if not (plans := [text.plan for text in self._sessions()]):
            self._free = now
            return
        device = now.device + sum(plan.device_bytes for plan in plans)
        self._free = Memory(min(self._free.device, device), min(self._free.host, now.host))

    def _sessions(self) -> list[SequenceState]:
        return [text for text in self.executor.sequences if isinstance(text, SequenceState)]

    def _free_arena(self) -> HostArena:
        """Return an arena that no open text uses; there is one more where all are taken."""
        taken = [text.runtime.arena for text in self._sessions()]
        for arena in self._arenas:
            if all(arena is not each for each in taken):
                return arena
        self._arenas.append(HostArena(self.runtime.link, self.runtime.dtype))
        return self._arenas[-1]

    def _memory(self) -> Memory:
        """Return what the next text may use on this rank, where no other text is open."""
        memory = self.runtime.memory()
        others = sum(arena.nbytes for arena in self._arenas if arena is not self.runtime.arena)
        return replace(memory, host=memory.host + others)

    def _common(self, plans: Mapping[Strategy, MemoryPlan]) -> dict[Strategy, MemoryPlan]:
        """Return this rank's plans of the ways that fit all ranks; all call it."""
        common = set.intersection(*self.group.gather(set(plans)))
        return {way: plan for way, plan in plans.items() if way in common}


def _cancel(session: SequenceState) -> None:
    """Let nothing of a text be written any more: a rank is lost, and nobody would keep it."""
    if session.saving is not None:
        session.saving.cancel()
