"""How much is put before each level that verifies, outermost first."""

from __future__ import annotations

from decoding.planning.defaults import MAX_DRAFT, MAX_INNER_DRAFT
from decoding.settings import Settings
from decoding.speculation.draft_length import Adaptive, DraftLength, Fixed

Lengths = tuple[DraftLength, ...]


def draft_lengths(settings: Settings) -> Lengths:
    """Return fixed lengths where they are set, else adaptive ones, to be used text after text."""
    inner = (settings.inner_length, MAX_INNER_DRAFT)
    rows = ((settings.draft_length, MAX_DRAFT), inner, inner)
    return tuple(Adaptive(longest) if given is None else Fixed(given) for given, longest in rows)
