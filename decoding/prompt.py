"""From a text to prompt tokens: the template around it, and what is cut where it does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decoding.rendering import rendered
from offload.errors import DocumentError, TierForceError, one_line

INSTRUCTION = "Summarize the text above."
_MARK = "\ue000document\ue000"  # stands for the text while a chat template is rendered


@dataclass(frozen=True)
class Template:
    """Tokens before and after a text."""

    before: list[int]
    after: list[int]

    @classmethod
    def plain(cls, tokenizer: Any) -> Template:
        """Return what the tokenizer puts before any text, such as <s>: it is to be continued."""
        return cls(tokenizer("").input_ids, [])

    @classmethod
    def chat(cls, tokenizer: Any, content: str = _MARK) -> Template:
        """Return what the tokenizer's chat template puts around a user's message.

        Raises TierForceError where there is no chat template, or a broken one.
        """
        if not tokenizer.chat_template:
            raise TierForceError(
                "the tokenizer has no chat template: use an instruct model, or leave out `chat`."
            )
        message = {"role": "user", "content": content}
        return cls(*parts_around(tokenizer, [message], [_MARK], "a document"))

    @classmethod
    def summary(cls, tokenizer: Any, instruction: str = INSTRUCTION) -> Template:
        """Ask for a summary, through the tokenizer's chat template where it has one.

        Raises TierForceError when that is broken.
        """
        if tokenizer.chat_template:
            return cls.chat(tokenizer, f"{_MARK}\n\n{instruction}")
        refuse_half_characters(instruction)
        after = tokenizer(f"\n\n{instruction}\n\n", add_special_tokens=False).input_ids
        return cls(tokenizer("").input_ids, after)

    def fill(
        self, tokenizer: Any, text: str, room: int, keep_end: bool = False
    ) -> tuple[list[int], int]:
        """Return at most `room` prompt tokens, and how many of the text's were dropped.

        The text's end is dropped, or with `keep_end` its beginning. What looks like a special token
        in it is plain text. Raises DocumentError when the template leaves no room for any of it.
        """
        tokens = plain_tokens(tokenizer, text)
        space = room - len(self.before) - len(self.after)
        if space < 1:
            raise DocumentError(
                f"no room left: the context has {max(0, room)} tokens for the prompt, and the "
                f"template alone takes {len(self.before) + len(self.after)}. Use a longer "
                "`context` or fewer `max_new_tokens`."
            )
        dropped = max(0, len(tokens) - space)
        kept = tokens[dropped:] if keep_end else tokens[:space]
        return [*self.before, *kept, *self.after], dropped


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, in which nothing is taken for a special token."""
    refuse_half_characters(text)
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids


def refuse_half_characters(text: str) -> None:
    """Raise DocumentError for a text that cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DocumentError(
            f"the text has half a character, or bytes that are not UTF-8: a lone surrogate at "
            f"index {error.start}."
        ) from error


def parts_around(
    tokenizer: Any, messages: Sequence[dict[str, str]], marks: Sequence[str], what: str
) -> list[list[int]]:
    """Return the tokens that a chat template puts before, between and behind marks in messages.

    The marks come in order, once each. Raises TierForceError for a template that cannot take
    `what` they stand for.
    """
    parts = []
    for message in messages:
        refuse_half_characters(message["content"])
    try:
        rest = rendered(tokenizer, messages)
        for mark in marks:
            if (times := rest.count(mark)) != 1:
                raise ValueError("it leaves it out" if not times else f"it has it {times} times")
            part, rest = rest.split(mark)
            parts.append(part)
    except Exception as error:  # jinja's, or whatever the template's own code raises
        raise TierForceError(
            f"the tokenizer's chat template cannot take {what} ({one_line(error)})."
        ) from error
    return [tokenizer(part, add_special_tokens=False).input_ids for part in (*parts, rest)]
