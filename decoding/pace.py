"""How much of the next prompt is read in a pass that waits for the link."""

from __future__ import annotations

from decoding.planning.defaults import EARLY_DELAY, EARLY_IDLE_SHARE, EARLY_IDLE_USED

_LESS, _MORE = 0.8, 1.05  # how a guess that has failed is changed, and one that has not


class Pace:
    """What passes of the target have shown: how long they wait, and what a step delays them.

    Times are a byte that comes over the link, for texts and their numbers change.
    """

    def __init__(self) -> None:
        self._step_s = 0.0  # of reading; 0 while no prompt has been read
        self._idle = 0.0  # seconds a byte that compute waits where nothing is read meanwhile
        self._alone: float | None = None  # seconds a byte of the fastest pass
        self._share = EARLY_IDLE_SHARE  # of the waiting that is filled

    def read_alone(self, seconds: float, steps: int) -> None:
        """Take note of a prompt that was read while nothing else was done."""
        self._step_s = seconds / steps

    def steps(self, nbytes: int) -> int:
        """Return the steps of reading that go into a pass which brings so many bytes."""
        return int(self._share * self._idle * nbytes / self._step_s) if self._step_s else 0

    def passed(self, nbytes: int, steps: int, wall_s: float, waited_s: float) -> None:
        """Take note of a pass with so many steps, and of the seconds it has waited all the same."""
        self._idle = (waited_s + steps * self._step_s) / nbytes
        if self._alone is None or wall_s < self._alone * nbytes:
            self._alone = wall_s / nbytes
        late = wall_s - EARLY_DELAY * self._alone * nbytes
        if steps and late > 0:
            self._share *= max(_LESS, 1 - late / (steps * self._step_s))
        else:
            self._share = min(EARLY_IDLE_SHARE, _MORE * self._share)
        if steps and waited_s < EARLY_IDLE_USED * self._idle * nbytes:
            self._step_s /= _LESS  # steps take longer than was thought
