"""What a model is asked to do with a text, and with a text in parts."""

from __future__ import annotations

from dataclasses import dataclass

INSTRUCTION = "Summarize the text above."
PART_INSTRUCTION = "{instruction}"
MERGE_INSTRUCTION = (
    "Above are answers about the consecutive parts of one text, in order. Merge them into one "
    "answer that does this for the whole text: {instruction}"
)


@dataclass(frozen=True)
class Instructions:
    """Instructions for a text, for a part of it, and for answers about its parts.

    In `part` and `merge`, {instruction} is that for the text; in `part`, {part} and {parts} are the
    part's number and the number of parts.
    """

    text: str = INSTRUCTION
    part: str = PART_INSTRUCTION
    merge: str = MERGE_INSTRUCTION

    def for_part(self, number: int, count: int) -> str:
        """Return the instruction for a part; the first one has number 1."""
        filled = self.part.replace("{part}", str(number)).replace("{parts}", str(count))
        return filled.replace("{instruction}", self.text)

    def for_merge(self) -> str:
        """Return the instruction for answers about parts."""
        return self.merge.replace("{instruction}", self.text)
