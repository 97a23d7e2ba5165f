"""What a model is asked to do with a text, and how its prompt is made of the two."""

from __future__ import annotations

from dataclasses import dataclass

from offload.errors import TierForceError

INSTRUCTION = "Summarize the text above."
PART_INSTRUCTION = "{instruction}"
MERGE_INSTRUCTION = (
    "Above are answers about the consecutive parts of one text, in order. Merge them into one "
    "answer that does this for the whole text: {instruction}"
)
MERGE_QUESTION = (
    "Above are answers to one question, each from another part of a text, in order. Parts that do "
    "not answer it do not matter. Answer it for the whole text: {instruction}"
)
SCHEMA_INSTRUCTION = "{instruction}\n\nAnswer in JSON that is valid under this schema: {schema}"
DOCUMENT, INSTRUCTION_MARK = "{document}", "{instruction}"
_TEMPLATE = f"{DOCUMENT}\n\n{INSTRUCTION_MARK}"


@dataclass(frozen=True)
class Instructions:
    """One instruction, or questions that are answered independently of each other."""

    strings: tuple[str, ...] = (INSTRUCTION,)
    are_questions: bool = False


@dataclass(frozen=True)
class PromptFormat:
    """How the prompts for a text, for a part of it, and for answers about its parts are made.

    Args:
        template: the prompt, or the message if there is a chat template, with {document} once and
            {instruction}; by default the text, an empty line, and the instruction.
        system: the system message.
        part: the instruction for a part, in which {instruction} is that for the text, {part} the
            part's number, and {parts} the number of parts.
        merge: the instruction for answers, in which {instruction} is that for the text; by default
            `MERGE_INSTRUCTION`, or `MERGE_QUESTION`.
        schema: the JSON schema of final answers, which is added to their instructions; those about
            parts, and those merged from some of them, are free text.

    Raises TierForceError for a template without the two.
    """

    template: str | None = None
    system: str | None = None
    part: str = PART_INSTRUCTION
    merge: str | None = None
    schema: str | None = None

    def __post_init__(self) -> None:
        if self.template is None:
            return
        counts = self.template.count(DOCUMENT), self.template.count(INSTRUCTION_MARK)
        if counts[0] != 1 or not counts[1]:
            raise TierForceError(
                f"a template must have {DOCUMENT} once and {INSTRUCTION_MARK} at least once, found "
                f"{counts[0]} and {counts[1]} of them."
            )

    @property
    def shares_document(self) -> bool:
        """Whether prompts with different instructions are the same up to the end of the text."""
        return INSTRUCTION_MARK not in self._template().partition(DOCUMENT)[0]

    def around(self, instruction: str, is_plain: bool) -> tuple[str, str]:
        """Return what precedes and what follows a text.

        `is_plain`: without a chat template the answer begins after the default's empty line.
        """
        before, _, after = self._template(is_plain).partition(DOCUMENT)
        return (
            before.replace(INSTRUCTION_MARK, instruction),
            after.replace(INSTRUCTION_MARK, instruction),
        )

    def for_answer(self, instruction: str) -> str:
        """Return the instruction for the final answer to an instruction."""
        if self.schema is None:
            return instruction
        filled = SCHEMA_INSTRUCTION.replace("{schema}", self.schema)
        return filled.replace(INSTRUCTION_MARK, instruction, 1)

    def for_part(self, instruction: str, number: int, count: int) -> str:
        """Return the instruction for a part; the first one has number 1."""
        filled = self.part.replace("{part}", str(number)).replace("{parts}", str(count))
        return filled.replace(INSTRUCTION_MARK, instruction)

    def merge_instruction(self, instructions: Instructions) -> str:
        """Return the instruction for answers, before {instruction} is replaced."""
        if self.merge is not None:
            return self.merge
        return MERGE_QUESTION if instructions.are_questions else MERGE_INSTRUCTION

    def for_merge(self, instructions: Instructions, index: int, is_last: bool) -> str:
        """Return the instruction that merges answers to the one with this index.

        `is_last`: to its final answer.
        """
        merge, own = self.merge_instruction(instructions), instructions.strings[index]
        merge = merge.replace(INSTRUCTION_MARK, own)
        return self.for_answer(merge) if is_last else merge

    def _template(self, is_plain: bool = False) -> str:
        if self.template is not None:
            return self.template
        return f"{_TEMPLATE}\n\n" if is_plain else _TEMPLATE
