"""What a batch is to do with its documents, as options say."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from decoding.app.documents.option_files import read_questions, read_schema, read_template
from decoding.app.options import LongDocuments
from decoding.text.instructions import INSTRUCTION, Instructions, PromptFormat
from offload.errors import TierForceError


@dataclass(frozen=True)
class Assignment:
    """What to do with documents. Those longer than the context are split, or else truncated."""

    instructions: Instructions = field(default_factory=Instructions)
    format: PromptFormat = field(default_factory=PromptFormat)
    splits: bool = True

    @classmethod
    def of(
        cls,
        instruction: str,
        questions: Path | None,
        system: str | None,
        template: Path | None,
        schema: Path | None,
        long: LongDocuments,
    ) -> Assignment:
        """Return the assignment that options describe. Raises TierForceError."""
        if questions is not None and instruction != INSTRUCTION:
            raise TierForceError("--questions are asked in place of --instruction: leave one out.")
        instructions = Instructions((instruction,))
        if questions is not None:
            instructions = Instructions(read_questions(questions), are_questions=True)
        text = None if template is None else read_template(template)
        form = None if schema is None else read_schema(schema)
        format = PromptFormat(text, system, long.part_instruction, long.merge_instruction, form)
        return cls(instructions, format, long.splits)

    def warnings(self, deterministic: bool) -> list[str]:
        """Return a line for each reason why questions prefill their document again."""
        lines = []
        if len(self.instructions.strings) > 1:
            if not self.format.shares_document:
                lines.append(
                    "--template has {instruction} before {document}: every question prefills its "
                    "document again."
                )
            if deterministic:
                lines.append("--deterministic: every question prefills its document again.")
        return lines
