"""Sessions, opened on all ranks together: each text's memory is planned, then allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress

from decoding.planning.choice import WayChoice, WayChooser
from decoding.planning.fit import affordable, least_budget
from decoding.planning.observed import ObservedCosts
from decoding.planning.way import Way
from decoding.runtime import Runtime
from decoding.session import Session
from decoding.speculation.draft_length import RoundStats
from offload.errors import FitError, TierForceError
from offload.memory_plan import MemoryPlan
from parallel.group import Group
from parallel.lockstep import follow_passes


class Sessions:
    """One session after another on the same models, on all ranks or on none."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.group: Group = runtime.target.group
        rate = runtime.link_rate() if runtime.needs.has_choice else None
        self.chooser = WayChooser(ObservedCosts(rate))

    def check(self, prompt: int, new: int) -> MemoryPlan:
        """Plan a text of that many tokens as `open` would now; this rank's plan.

        All ranks call it. Raises FitError, on all ranks, when the text would not fit.
        """
        with self.group.together():
            plans = self._affordable(prompt, new)
        if self.runtime.needs.has_choice and not self._common(plans):
            raise FitError(
                "no one mode and retrieval budget fit all ranks: set `mode` and `budget`, or free "
                "memory on the fullest GPU."
            )
        choice = self.choose(prompt, new)
        with self.group.together():
            return self.runtime.with_way(choice.way).plan(prompt, new)

    def choose(self, prompt: int, new: int) -> WayChoice:
        """Choose a text's mode and retrieval budget, the same on all ranks.

        What fits nowhere is left to `open` to refuse.
        """
        needs = self.runtime.needs
        if not needs.has_choice:
            return WayChoice(needs.way, "set")
        try:
            plans = self._affordable(prompt, new)
        except FitError:
            plans = {}
        if not (common := self._common(plans)):
            return WayChoice(Way(needs.mode, least_budget(needs)), "nothing fits")
        return self.group.broadcast(self.chooser.choose(needs, common, prompt))

    def open(self, prompt: Sequence[int], new: int, choice: WayChoice) -> Session:
        """Allocate what a text takes. Raises FitError, on all ranks."""
        with self.group.together():
            return Session(self.runtime.with_way(choice.way), list(prompt), new)

    def record(self, session: Session, rounds: list[RoundStats]) -> None:
        """Learn from a text that is done what the next one's mode and budget may go by."""
        self.chooser.record(session.runtime.needs, session.plan, len(session.prompt), rounds)

    def follow(self) -> bool:
        """Take part in one text that rank 0 begins; on the other ranks.

        Returns whether there was one: rank 0 may have closed the engine instead.
        """
        request = self.group.broadcast(None)
        if request is None:
            return False
        prompt, new = request
        try:
            session = self.open(prompt, new, self.choose(len(prompt), new))
        except TierForceError:
            return True  # raised on rank 0 too, which tells
        with closing(session):
            # raised on rank 0 too, which ends the passes before there is one
            with suppress(TierForceError):
                session.prefill()
            follow_passes(session.announced, session.max_tokens, session.forward)
        return True

    def _affordable(self, prompt: int, new: int) -> dict[Way, MemoryPlan]:
        return affordable(self.runtime.needs, self.runtime.memory(), prompt, new)

    def _common(self, plans: Mapping[Way, MemoryPlan]) -> dict[Way, MemoryPlan]:
        """Return this rank's plans of the ways that fit all ranks; all call it."""
        common = set.intersection(*self.group.gather(set(plans)))
        return {way: plan for way, plan in plans.items() if way in common}
