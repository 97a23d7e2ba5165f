"""Sessions, opened on all ranks together: each text's memory is planned, then allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor

from decoding.engine.session import Session
from decoding.models.runtime import Runtime
from decoding.planning.fit import Memory, affordable, fit, least_budget, nearest_way
from decoding.planning.measured_cost import ObservedCosts
from decoding.planning.memory_plan import MemoryPlan
from decoding.planning.memory_requirements import Way
from decoding.planning.strategy_selector import WayChoice, WayChooser
from decoding.speculation.draft_length import RoundStats
from offload.errors import FitError, TierForceError
from offload.memory.host_arena import HostArena
from parallel.execution.lockstep import Lockstep
from parallel.model.transformer import Progress
from parallel.ranks.process_group import Group


@dataclass(frozen=True)
class _Nothing:
    """What rank 0 tells the others while no text is opened."""


@dataclass(frozen=True)
class _Opening:
    """What rank 0 tells the others of a text that is opened."""

    prompt: list[int]
    new: int
    at_once: int  # texts that share the memory, this one among them
    name: str  # that people know it by


class Sessions:
    """The sessions of texts on the same models, each on all ranks or on none."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.group: Group = runtime.target.group
        rate, prior = None, None
        if runtime.needs.has_choice:
            rate = runtime.link_rate()
            with self.group.together():
                prior = runtime.prior(rate)
        self.chooser = WayChooser(ObservedCosts(rate), prior)
        self.lockstep = Lockstep(self.group)
        self._arenas = [runtime.arena]  # one for each text that was open at once
        self._free = Memory(0, 0)  # what there was when no text was open
        self.keeper = runtime.keeper()

    def check(self, prompt: int, new: int, at_once: int = 1) -> MemoryPlan:
        """Plan a text of that many tokens as `open` would now; this rank's plan.

        All ranks call it. Raises FitError, on all ranks, when the text would not fit.
        """
        memory = self._memory().shared(at_once)
        with self.group.together():
            plans = affordable(self.runtime.needs, memory, prompt, new)
        if self.runtime.needs.has_choice and not self._common(plans):
            raise FitError(
                "no one mode and retrieval budget fit all ranks: set `mode` and `budget`, or free "
                "memory on the fullest GPU."
            )
        choice = self.choose(prompt, new, memory)
        with self.group.together():
            return fit(self.runtime.with_way(choice.way).needs, memory, prompt, new)

    def that_fit(self, prompt: int, new: int, most: int) -> int:
        """Return how many such texts, at most `most`, are each planned as they would be alone.

        All ranks call it. Raises FitError, on all ranks, when one alone would not fit.
        """
        alone = self.check(prompt, new)
        for count in range(2, most + 1):
            try:
                shared = self.check(prompt, new, count)
            except FitError:
                return count - 1
            if any(self.group.gather(shared != alone)):
                return count - 1
        return max(1, most)

    def choose(self, prompt: int, new: int, memory: Memory | None = None) -> WayChoice:
        """Choose a text's mode and retrieval budget, the same on all ranks.

        `memory` is this rank's, by default what there is. What fits nowhere is left to `open` to
        refuse.
        """
        needs = self.runtime.needs
        if not needs.has_choice:
            return WayChoice(needs.way, "set")
        memory = memory or self._memory()
        refused = Way(needs.mode, least_budget(needs))
        try:
            plans = affordable(needs, memory, prompt, new)
        except FitError:
            plans = {}
            refused = nearest_way(needs, memory, prompt, new) or refused
        if not (common := self._common(plans)):
            return self.group.broadcast(WayChoice(refused, "nothing fits"))
        return self.group.broadcast(self.chooser.choose(needs, common, prompt, memory.texts))

    def open(self, prompt: Sequence[int], new: int, at_once: int = 1, name: str = "") -> Session:
        """Begin a text on all ranks: allocate what it takes in the way that is chosen; for rank 0.

        It gets an equal share of the memory that there is. Prefill is to follow, and `close` to end
        it. `name` is what people call it where it is kept on disk. Raises FitError, on all ranks.
        """
        self.lockstep.announce_another()
        return self._open(self.group.broadcast(_Opening(list(prompt), new, at_once, name)))

    def on_disk(self, prompt: Sequence[int], new: int) -> int:
        """Return how many tokens of a prompt need not be read, for they are kept; for rank 0."""
        if self.keeper is None:
            return 0
        return self.keeper.find(self._identity(prompt, new), prompt)

    def has_kept(self, prompt: Sequence[int], new: int) -> bool:
        """Return whether a prompt is kept, or nearly all of it; for rank 0."""
        return self.keeper is not None and self.keeper.has(self._identity(prompt, new), prompt)

    def _identity(self, prompt: Sequence[int], new: int) -> str:
        assert self.keeper is not None
        config, tokens = self.runtime.target.config, len(prompt)
        return self.keeper.identity.of_text(config, tokens, tokens + new)

    def extend(
        self,
        session: Session,
        tokens: Sequence[int],
        kept: int,
        rooms: Sequence[int],
        progress: Progress | None = None,
    ) -> Tensor:
        """Read an open text on, on all ranks, as `Session.extend` does; for rank 0."""
        self.lockstep.announce_extension(session, tokens, kept, rooms)
        return session.extend(tokens, kept, rooms, progress)

    def close(self, session: Session) -> None:
        """End a text on all ranks; for rank 0."""
        try:
            self.lockstep.announce_end(session)
        except TierForceError:
            _give_up(session)
            raise
        finally:
            self.lockstep.close(session)

    def keep_alive(self) -> None:
        """Let the other ranks go on waiting for what rank 0 does next: they do so for hours only.

        For rank 0, between two passes.
        """
        if self.lockstep.texts:
            self.lockstep.announce_nothing()
        else:
            self.group.broadcast(_Nothing())

    def record(self, session: Session, rounds: list[RoundStats]) -> None:
        """Learn from a text that is done what the next one's mode and budget may go by."""
        self.chooser.record(session.runtime.needs, session.plan, len(session.prompt), rounds)

    def follow(self) -> bool:
        """Take part in the text that rank 0 begins, and in those it begins before that is over.

        For the other ranks. Returns whether there was one: rank 0 may have closed the engine.
        """
        if not self._follow_one():
            return False
        try:
            while self.lockstep.texts:
                over = self.lockstep.follow()
                if over is None:
                    self._follow_one()
                else:
                    self.lockstep.close(over)
        except BaseException:
            for each in self._sessions():
                _give_up(each)
            raise
        finally:
            for text in list(self.lockstep.texts):
                self.lockstep.close(text)
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

    def _open(self, request: _Opening) -> Session:
        prompt, new = request.prompt, request.new
        if not self.lockstep.texts:
            self._count_arenas(request.at_once)
        self._count_memory()
        memory = self._free.shared(request.at_once)
        choice = self.choose(len(prompt), new, memory)
        runtime = self.runtime.with_way(choice.way)
        with self.group.together():
            plan = runtime.plan(len(prompt), new, memory)
        with self.group.together():
            runtime = replace(runtime, arena=self._free_arena())
            session = Session(runtime, prompt, new, choice, plan, self.keeper, request.name)
        session.turn_tokens = min(self.group.gather(session.turn_tokens))
        self.lockstep.add(session)
        return session

    def _count_arenas(self, texts: int) -> None:
        """Keep one for each text."""
        for arena in self._arenas[texts:]:
            arena.let_go()
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

    def _sessions(self) -> list[Session]:
        return [text for text in self.lockstep.texts if isinstance(text, Session)]

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

    def _common(self, plans: Mapping[Way, MemoryPlan]) -> dict[Way, MemoryPlan]:
        """Return this rank's plans of the ways that fit all ranks; all call it."""
        common = set.intersection(*self.group.gather(set(plans)))
        return {way: plan for way, plan in plans.items() if way in common}


def _give_up(session: Session) -> None:
    """Let nothing of a text be written any more: a rank is lost, and nobody would keep it."""
    if session.saving is not None:
        session.saving.give_up()
