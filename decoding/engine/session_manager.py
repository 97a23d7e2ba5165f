"""Sequences, opened on all ranks together: the memory of each is planned, then allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from decoding.engine.levels import SequenceSlot
from decoding.engine.session import SequenceState
from decoding.models.runtime import Runtime
from decoding.planning.memory_plan import MemoryPlan
from decoding.planning.plan import Memory, Plan
from decoding.planning.planner import Planner, max_concurrent
from decoding.speculation.draft_length import RoundStats
from offload.errors import InsufficientMemoryError, TierForceError
from offload.memory.host_arena import HostArena
from offload.tiered.prefill import copy_prefix
from parallel.execution.cuda_graphs import GraphRunner
from parallel.execution.executor import Close, Open, TensorParallelExecutor
from parallel.ranks.process_group import TensorParallelGroup


class SequenceManager:
    """The open sequences of one set of models, each open on all ranks or on none."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.group: TensorParallelGroup = runtime.target.group
        rate = runtime.link_rate() if runtime.requirements.has_choice else None
        with self.group.sync_errors():
            self.planner = Planner(runtime.requirements, runtime.costs(rate))
        graphs = GraphRunner(bool(runtime.settings.graphs), self.group.graph_capturer)
        self.executor = TensorParallelExecutor(self.group, graphs)
        self.slots = Slots(runtime, self.executor)
        self._free = Memory(0, 0)  # the free memory when no sequence was open
        self.prefix_cache = runtime.prefix_cache()

    def plan(self, prompt_tokens: int, max_new_tokens: int, concurrency: int = 1) -> Plan:
        """Return this rank's plan for a sequence of this size, as `open` would make it now.

        All ranks call it. Raises InsufficientMemoryError on all ranks if it would not fit.
        """
        return self._plan(prompt_tokens, max_new_tokens, self._memory().divided(concurrency))

    def max_concurrency(self, prompt_tokens: int, max_new_tokens: int, limit: int) -> int:
        """Return how many such sequences, at most `limit`, run concurrently at no cost to each.

        Each gets the plan that one alone gets. The result is 1 if forwards are not shared. All
        ranks call it. Raises InsufficientMemoryError on all ranks if one alone would not fit.
        """
        best = max_concurrent(
            lambda count: self.plan(prompt_tokens, max_new_tokens, count),
            1 if self.runtime.settings.deterministic else limit,
            any_rank=lambda holds: any(self.group.gather(holds)),
        )
        return best.concurrency

    def open(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        concurrency: int = 1,
        name: str = "",
        source: SequenceState | None = None,
        shared: int = 0,
    ) -> SequenceState:
        """Open a sequence on all ranks: select a strategy and allocate its caches; for rank 0.

        It gets an equal share of the free memory. Prefill follows, and `close` ends it. `name` is
        its display name in the prompt cache. The KV of the first `shared` tokens is copied from
        `source`, an open sequence. Raises InsufficientMemoryError on all ranks.
        """
        index, lengths = 0, list[int]()
        if source is not None:
            index = self.executor.sequences.index(source)
            lengths = self.executor.lengths_of(source)
        command = Open(list(prompt), max_new_tokens, concurrency, name, index, shared, lengths)
        self.executor.send(command)
        return self._open(command)

    def cached_prefix(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        """Return how many tokens of a prompt the prompt cache can load; for rank 0."""
        if self.prefix_cache is None:
            return 0
        return self.prefix_cache.find(self._identity(prompt, max_new_tokens), prompt)

    def is_cached(self, prompt: Sequence[int], max_new_tokens: int) -> bool:
        """Return whether the prompt cache has a prompt, or nearly all of it; for rank 0."""
        return self.prefix_cache is not None and self.prefix_cache.has(
            self._identity(prompt, max_new_tokens), prompt
        )

    def _identity(self, prompt: Sequence[int], max_new_tokens: int) -> str:
        assert self.prefix_cache is not None
        config, tokens = self.runtime.target.config, len(prompt)
        return self.prefix_cache.fingerprint.kv_identity(config, tokens, tokens + max_new_tokens)

    def close(self, session: SequenceState) -> None:
        """Close a sequence on all ranks; for rank 0."""
        executor = self.executor
        try:
            executor.send(Close(executor.sequences.index(session)))
        except TierForceError:
            _cancel(session)
            raise
        finally:
            executor.remove(session)

    def plans(self) -> list[MemoryPlan]:
        """Return the memory plans of all open sequences on this rank."""
        return [session.plan.memory for session in _states(self.executor)]

    def record(
        self, session: SequenceState, rounds: Sequence[RoundStats], concurrency: int = 1
    ) -> None:
        """Record a finished sequence's rounds, on which later choices of strategy are based.

        `concurrency`: how many sequences shared forwards with it; not those it was planned for.
        """
        spec = replace(session.plan.spec, prompt=len(session.prompt))
        self.planner.record(replace(session.plan, spec=spec, concurrency=concurrency), rounds)

    def run_worker(self) -> bool:
        """Take part in the next sequence that rank 0 opens, and in those opened before it closes.

        For the other ranks. Returns False if rank 0 has closed the engine instead.
        """
        try:
            return self.executor.worker_loop(self._open)
        except BaseException:
            for session in _states(self.executor):
                _cancel(session)
            raise
        finally:
            for sequence in list(self.executor.sequences):
                self.executor.remove(sequence)

    def _open(self, command: Open) -> SequenceState:
        prompt, max_new_tokens = command.prompt, command.max_new_tokens
        if not self.executor.sequences:
            self.slots.trim(command.concurrency)
        self._update_free()
        memory = self._free.divided(command.concurrency)
        plan = self._plan(len(prompt), max_new_tokens, memory)
        with self.group.sync_errors():
            slot = self.slots.unused()
            slot.share = memory if command.concurrency > 1 else None
            session = SequenceState(
                self.runtime, prompt, max_new_tokens, plan, self.prefix_cache, command.name, slot
            )
        session.capture_graphs()
        with self.group.sync_errors():
            if command.shared:
                source = self.executor.sequences[command.source]
                assert isinstance(source, SequenceState)
                copy_prefix(source.target, session.target, command.shared)
        session.extend_chunk = min(self.group.gather(session.extend_chunk))
        self.executor.add(session)
        return session

    def _plan(self, prompt_tokens: int, max_new_tokens: int, memory: Memory) -> Plan:
        """Plan a sequence on all ranks, in a mode and budget that fit every rank's memory.

        Rank 0, which measures rounds, chooses them. Raises InsufficientMemoryError on all ranks.
        """
        with self.group.sync_errors():
            candidates = self.planner.candidates(prompt_tokens, max_new_tokens, memory)
        if not self.runtime.requirements.has_choice:
            return self.planner.choose(candidates)
        common = set.intersection(*self.group.gather(set(candidates)))
        if not common:
            raise InsufficientMemoryError(
                "no mode and retrieval budget fit all ranks: set `mode` and `retrieval_budget`, or "
                "free memory on the fullest GPU."
            )
        fitting = {key: plan for key, plan in candidates.items() if key in common}
        with self.group.sync_errors():
            plan = self.planner.choose(fitting)
        strategy, reason = self.group.broadcast((plan.requirements.strategy, plan.reason))
        return replace(candidates[strategy], reason=reason)

    def _update_free(self) -> None:
        """Update the memory that would be free without open sequences.

        While some are open, it is bounded by their plans plus what is free now.
        """
        now = self._memory()
        if not (plans := self.plans()):
            self._free = now
            return
        device = now.device + sum(plan.device_bytes for plan in plans)
        self._free = Memory(min(self._free.device, device), min(self._free.host, now.host))

    def _memory(self) -> Memory:
        """Return what the next sequence may use on this rank if no other is open."""
        memory = self.runtime.memory(self.slots.reusable_bytes)
        return replace(memory, host=memory.host + self.slots.other_host_bytes)


class Slots:
    """A slot for each concurrent sequence, kept for those that follow."""

    def __init__(self, runtime: Runtime, executor: TensorParallelExecutor):
        self._new_arena = partial(HostArena, runtime.link, runtime.dtype)
        self._executor = executor
        self._slots = [SequenceSlot(runtime.arena, executor.graphs)]

    @property
    def other_host_bytes(self) -> int:
        """Bytes of all arenas but the runtime's own."""
        return sum(slot.arena.nbytes for slot in self._slots[1:])

    @property
    def reusable_bytes(self) -> int:
        """Bytes of device memory of the slots that are not in use."""
        return sum(slot.device_bytes for slot in self._unused())

    def trim(self, count: int) -> None:
        """Free all slots but the first `count`; none is in use."""
        for slot in self._slots[count:]:
            slot.free()
            slot.arena.free()
        del self._slots[count:]

    def unused(self) -> SequenceSlot:
        """Return the first slot that is not in use, a new one if all are."""
        for slot in self._unused():
            return slot
        slot = SequenceSlot(self._new_arena(), self._executor.graphs, len(self._slots))
        self._slots.append(slot)
        return slot

    def free_caches(self) -> None:
        """Free the caches that finished sequences left, and their CUDA graphs."""
        for slot in self._slots:
            slot.free()

    def _unused(self) -> list[SequenceSlot]:
        in_use = [session.slot for session in _states(self._executor)]
        return [slot for slot in self._slots if slot not in in_use]


def _states(executor: TensorParallelExecutor) -> list[SequenceState]:
    """Return the open sequences."""
    return [each for each in executor.sequences if isinstance(each, SequenceState)]


def _cancel(session: SequenceState) -> None:
    """Stop saving a prompt: a rank is lost, so it could not be completed."""
    if session.saving is not None:
        session.saving.cancel()
