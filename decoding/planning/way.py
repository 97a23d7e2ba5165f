"""How a text is drafted for: what is chosen text by text where settings leave it open."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """A mode, and the retrieval budget in it."""

    mode: str  # one of LEVELS
    budget: int  # tokens a head; it means nothing where a mode has no retrieval
