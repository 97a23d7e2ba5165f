"""Texts that end an answer."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for stop strings in text that comes in pieces; one may begin in one and end in another.

    What may be the beginning of one is held back until the next piece tells.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""
        self.is_hit = False

    def feed(self, piece: str) -> str:
        """Return the text that can be shown; where one `is_hit`, the last, without it."""
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_hit, self._held = True, ""
            return text[: min(found)]
        begun = (
            length
            for stop in self._stops
            for length in range(1, len(stop))
            if text.endswith(stop[:length])
        )
        shown = len(text) - max(begun, default=0)
        self._held = text[shown:]
        return text[:shown]

    def rest(self) -> str:
        """Return what was held back: no more text comes."""
        held, self._held = self._held, ""
        return held
