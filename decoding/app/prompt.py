"""From a document to prompt tokens: the template around it, and what is cut when it does not
fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offload.errors import DocumentError, TierForceError, one_line

INSTRUCTION = "Summarize the text above."
_MARK = "\ue000document\ue000"  # stands for the document while a chat template is rendered


@dataclass(frozen=True)
class Template:
    """Tokens before and after a document."""

    before: list[int]
    after: list[int]

    @classmethod
    def summary(cls, tokenizer: Any, instruction: str = INSTRUCTION) -> Template:
        """Ask for a summary, through the tokenizer's chat template where it has one. Raises
        TierForceError when that is broken.
        """
        if not tokenizer.chat_template:
            # what the tokenizer puts before any text, such as <s>
            specials = tokenizer("").input_ids
            return cls(
                specials, tokenizer(f"\n\n{instruction}\n\n", add_special_tokens=False).input_ids
            )
        message = {"role": "user", "content": f"{_MARK}\n\n{instruction}"}
        try:
            rendered = tokenizer.apply_chat_template(
                [message], tokenize=False, add_generation_prompt=True
            )
            before, after = rendered.split(_MARK)
        except Exception as error:  # jinja's, or whatever the template's own code raises
            raise TierForceError(
                f"the tokenizer's chat template cannot take a document ({one_line(error)})."
            ) from error
        return cls(
            *(tokenizer(part, add_special_tokens=False).input_ids for part in (before, after))
        )

    def fill(self, tokenizer: Any, text: str, room: int) -> tuple[list[int], int]:
        """Return at most `room` prompt tokens, and how many of the document's were dropped.

        The document's end is dropped. What looks like a special token in it is plain text. Raises
        DocumentError when the template leaves no room for any of the document.
        """
        tokens = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        space = room - len(self.before) - len(self.after)
        if space < 1:
            raise DocumentError(
                f"no room left: the context has {max(0, room)} tokens for the prompt, and the "
                f"template alone takes {len(self.before) + len(self.after)}. Use a longer "
                "--context or fewer --max-new-tokens."
            )
        return [*self.before, *tokens[:space], *self.after], max(0, len(tokens) - space)
