"""Sequences, opened on all ranks together: the memory of each is planned, then allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from decoding.engine.levels import SequenceSlot, graph_runner
from decoding.engine.session import SequenceState, SwappedSequence
from decoding.engine.warm_up import warm_up
from decoding.models.runtime import Runtime
from decoding.planning.memory_plan import MemoryPlan
from decoding.planning.plan import Memory, Plan
from decoding.planning.planner import Planner, max_concurrent
from decoding.planning.requirements import largest_forward
from decoding.prefix_cache.stored_prompt import StoredPrompt
from decoding.speculation.draft_length import RoundStats
from offload.errors import InsufficientMemoryError, TierForceError
from offload.memory.host import host_available
from offload.memory.host_arena import HostArena
from offload.tiered.cache import checkpoint_at
from parallel.execution.executor import (
    Close,
    Extend,
    Open,
    OpenSequence,
    SwapOut,
    TensorParallelExecutor,
    sharded_lengths,
)
from parallel.ranks.process_group import TensorParallelGroup


class SequenceManager:
    """The open sequences of one set of models, each open on all ranks or on none."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.group: TensorParallelGroup = runtime.target.group
        warm_up(runtime)
        rate = runtime.link_rate() if runtime.requirements.has_choice else None
        with self.group.sync_errors():
            self.planner = Planner(runtime.requirements, runtime.costs(rate))
        max_tokens = largest_forward(runtime.requirements)
        self.executor = TensorParallelExecutor(self.group, graph_runner(runtime), max_tokens)
        self.slots = Slots(runtime, self.executor)
        self.memory = AvailableMemory(runtime, self.executor, self.slots)
        self.prefix_cache = runtime.prefix_cache()

    def plan(self, prompt_tokens: int, max_new_tokens: int, concurrency: int = 1) -> Plan:
        """Return this rank's plan for a sequence of this size, as `open` would make it now.

        All ranks call it. Raises InsufficientMemoryError on all ranks if it would not fit.
        """
        return self._plan(prompt_tokens, max_new_tokens, self.memory.now().divided(concurrency))

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
        source: SequenceState | SwappedSequence | None = None,
        shared: int = 0,
        checkpoint: int = 0,
    ) -> SequenceState:
        """Open a sequence on all ranks: select a strategy and allocate its caches; for rank 0.

        It gets an equal share of the free memory. Prefill follows, and `close` ends it. `name` is
        its display name in the prompt cache. The prefill copies the first `shared` tokens from
        `source`. Sequences that are swapped out are closed if the memory is needed, `source` last:
        then the whole prompt is prefilled. Later ones may go on from the position `checkpoint`.
        Raises InsufficientMemoryError on all ranks.
        """
        index, lengths = 0, list[int]()
        if source is not None:
            index = self.executor.sequences.index(source)
            lengths = sharded_lengths(source)
        copied = index, shared, lengths
        command = Open(list(prompt), max_new_tokens, concurrency, name, *copied, checkpoint)
        self.executor.send(command)
        return self._open(command)

    def extend(self, session: SequenceState, tokens: Sequence[int], cached: int) -> None:
        """Begin to extend a sequence on all ranks (`SequenceState.extend_steps`); for rank 0.

        It becomes `tokens`, whose first `cached` it already holds.
        """
        index, lengths = self.executor.sequences.index(session), sharded_lengths(session)
        self.executor.run(Extend(index, list(tokens), cached, lengths))

    def swap_out(self, session: SequenceState, cached: int = 0) -> SwappedSequence:
        """Begin to copy a sequence's KV to host memory; for rank 0. `close` then frees its caches.

        `TensorParallelExecutor.prefill` goes on with it. `cached`: how many of its tokens the turn
        begins with that needs larger caches.
        """
        index, lengths = self.executor.sequences.index(session), sharded_lengths(session)
        swapped = self.executor.run(SwapOut(index, cached, lengths))
        assert isinstance(swapped, SwappedSequence)
        return swapped

    def cached_prefix(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        """Return how many tokens of a prompt the prompt cache can load; for rank 0."""
        if self.prefix_cache is None:
            return 0
        return self.prefix_cache.find(self.kv_identity(len(prompt), max_new_tokens), prompt)

    def is_cached(self, prompt: Sequence[int], max_new_tokens: int) -> bool:
        """Return whether the prompt cache has a prompt, or nearly all of it; for rank 0."""
        return self.prefix_cache is not None and self.prefix_cache.has(
            self.kv_identity(len(prompt), max_new_tokens), prompt
        )

    def kv_identity(self, tokens: int, max_new_tokens: int) -> str:
        """Return the identity of the KV of a prompt of `tokens` tokens, in the prompt cache.

        Requires a prompt cache; on any thread.
        """
        assert self.prefix_cache is not None
        rope_key = self.runtime.target.config.rope_key(tokens, tokens + max_new_tokens)
        layout = self.runtime.requirements.layout
        return self.prefix_cache.fingerprint.kv_identity(rope_key, layout)

    def close(self, session: SequenceState | SwappedSequence) -> None:
        """Close a sequence on all ranks; for rank 0."""
        executor = self.executor
        try:
            executor.send(Close(executor.sequences.index(session)))
        except TierForceError:
            if isinstance(session, SequenceState):
                session.stored.cancel()
            executor.remove(session, is_lost=True)
            raise
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
                session.stored.cancel()
            raise
        finally:
            for sequence in list(self.executor.sequences):
                self.executor.remove(sequence, is_lost=True)

    def _open(self, command: Open) -> SequenceState:
        prompt, max_new_tokens = command.prompt, command.max_new_tokens
        if not _states(self.executor):
            self.slots.trim(command.concurrency)
        memory = self.memory.share(command.concurrency, self.plans())
        plan = self._plan(len(prompt), max_new_tokens, memory)
        source = self.executor.sequences[command.source] if command.shared else None
        assert source is None or isinstance(source, SequenceState | SwappedSequence)
        slot, stored = self.slots.unused(), StoredPrompt(self.prefix_cache, command.name)
        self.memory.evict(plan.memory, slot, source)
        if source not in self.executor.sequences:
            source = None
        with self.group.sync_errors():
            session = SequenceState(self.runtime, prompt, max_new_tokens, plan, stored, slot)
        checkpoint_at(session.target, command.checkpoint)
        if source is not None:
            with self.group.sync_errors():
                session.copy(source, command.shared)
        session.capture_graphs()
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
                "no mode and budget fit all ranks: set `mode`, `retrieval_budget` and "
                "`split_budget`, or free memory on the fullest GPU."
            )
        fitting = {key: plan for key, plan in candidates.items() if key in common}
        with self.group.sync_errors():
            plan = self.planner.choose(fitting)
        strategy, reason = self.group.broadcast((plan.requirements.strategy, plan.reason))
        return replace(candidates[strategy], reason=reason)


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


class AvailableMemory:
    """The memory of this rank that sequences may use."""

    def __init__(self, runtime: Runtime, executor: TensorParallelExecutor, slots: Slots):
        self._runtime, self._executor, self._slots = runtime, executor, slots
        self._on_cpu = runtime.target.group.device.type == "cpu"  # device memory is host memory
        # the memory when no sequence was open, bounded by what is free since
        self.whole = Memory(0, 0)

    @property
    def swapped(self) -> list[SwappedSequence]:
        """Return the sequences that are swapped out, the oldest one first."""
        return [each for each in self._executor.sequences if isinstance(each, SwappedSequence)]

    @property
    def swapped_bytes(self) -> int:
        """Return the bytes of host memory of sequences that are swapped out."""
        return sum(each.target.nbytes for each in self.swapped)

    def now(self) -> Memory:
        """Return what the next sequence may use if no other is open.

        The memory of what is swapped out counts as free, once all of it is.
        """
        swapped = sum(each.target.nbytes for each in self._evictable())
        reusable = self._slots.reusable_bytes + (swapped if self._on_cpu else 0)
        graphs = self._executor.graphs
        memory = self._runtime.memory(reusable, int(min(graphs.nbytes, graphs.max_bytes)))
        return replace(memory, host=memory.host + self._slots.other_host_bytes + swapped)

    def share(self, concurrency: int, plans: Sequence[MemoryPlan]) -> Memory:
        """Return one of `concurrency` equal shares of what would be free without open sequences.

        While some are open, that is bounded by their plans plus what is free now.
        """
        now = self.now()
        if plans:
            device = now.device + sum(plan.device_bytes for plan in plans)
            now = Memory(min(self.whole.device, device), min(self.whole.host, now.host))
        self.whole = now
        return now.divided(concurrency)

    def evict(self, plan: MemoryPlan, slot: SequenceSlot, source: OpenSequence | None) -> None:
        """Close sequences that are swapped out, the oldest first, until a plan fits on all ranks.

        It is the plan of a sequence in this slot, which would copy `source`: that is the last one.
        """
        group = self._runtime.target.group
        needed = max(0, plan.host_bytes - slot.arena.nbytes) - host_available() // group.size
        if self._on_cpu:
            needed += plan.device_bytes
        swapped, count = sorted(self._evictable(), key=lambda each: each is source), 0
        while needed > 0 and count < len(swapped):
            needed -= swapped[count].target.nbytes
            count += 1
        for each in swapped[: max(group.gather(count))]:
            self._executor.remove(each)

    def _evictable(self) -> list[SwappedSequence]:
        """Return the sequences that are swapped out wholly, the oldest one first."""
        return [each for each in self.swapped if each.target.is_complete]


def _states(executor: TensorParallelExecutor) -> list[SequenceState]:
    """Return the open sequences."""
    return [each for each in executor.sequences if isinstance(each, SequenceState)]
