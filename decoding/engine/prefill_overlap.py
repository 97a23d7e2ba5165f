"""How much of the next prompt is read in a pass that waits for the link."""

from __future__ import annotations

from decoding.config.defaults import EARLY_CHUNK_COST, EARLY_DELAY, EARLY_IDLE_SHARE

_LESS, _MORE = 0.8, 1.05  # of the share that is filled: at least behind a late pass, behind others


class Pace:
    """What passes of the target have shown: how long they wait, and what a step costs them.

    Times are a byte that comes over the link, for texts and their numbers change.
    """

    def __init__(self) -> None:
        self._step_s = 0.0  # of reading; 0 while no prompt has been read
        self._idle = 0.0  # seconds a byte that a pass waits in which nothing is read
        self._alone: float | None = None  # seconds a byte of the fastest pass
        self._share = EARLY_IDLE_SHARE  # of the waiting that is filled

    def read_alone(self, seconds: float, steps: int) -> None:
        """Take note of a prompt that was read while nothing else was done."""
        if not self._step_s:
            self._step_s = EARLY_CHUNK_COST * seconds / steps

    def steps(self, nbytes: int) -> int:
        """Return the steps of reading that go into a pass which brings so many bytes."""
        return int(self._share * self._idle * nbytes / self._step_s) if self._step_s else 0

    def passed(self, nbytes: int, steps: int, wall_s: float, waited_s: float) -> None:
        """Take note of a pass with so many steps, and of the seconds it has waited all the same."""
        if self._alone is None or wall_s < self._alone * nbytes:
            self._alone = wall_s / nbytes
        if not steps:
            self._idle = waited_s / nbytes
            return
        late_s = wall_s - self._alone * nbytes
        cost_s = self._idle * nbytes - waited_s + late_s
        if cost_s > 0:
            self._step_s = (self._step_s + cost_s / steps) / 2
        self._share *= _MORE
        if (beyond_s := late_s - EARLY_DELAY * self._alone * nbytes) > 0:
            self._share *= max(_LESS, 1 - beyond_s / (steps * self._step_s)) / _MORE
        self._share = min(EARLY_IDLE_SHARE, self._share)
