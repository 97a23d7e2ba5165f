"""Stop strings: strings that end an answer."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds stop strings in streamed text, also across the borders of its pieces.

    Text that may be the beginning of a stop string is held back until the next piece decides.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""
        self.is_hit = False

    def feed(self, piece: str) -> str:
        """Return the text to show; once `is_hit`, it is the last, up to the stop string."""
        text = self._held + piece
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            self.is_hit, self._held = True, ""
            return text[: min(starts)]
        partial_matches = (
            length
            for stop in self._stops
            for length in range(1, len(stop))
            if text.endswith(stop[:length])
        )
        shown = len(text) - max(partial_matches, default=0)
        self._held = text[shown:]
        return text[:shown]

    def rest(self) -> str:
        """Return the text that is held back, after the last piece."""
        held, self._held = self._held, ""
        return held
