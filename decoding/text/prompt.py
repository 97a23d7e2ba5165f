"""From a text or messages to prompt tokens: the template around them, and what is cut to fit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decoding.text.chat_template import render_chat
from decoding.text.encoding import (
    SpecialTokenGuard,
    check_length,
    check_whole_characters,
    clip,
    plain_tokens,
    prefix_tokens,
    truncate_to,
)
from offload.errors import InvalidRequestError, TierForceError, one_line

INSTRUCTION = "Summarize the text above."
_DOCUMENT = "a document"
MARK = "\ue000\ue001\ue000"  # stands for a text of which only the surroundings are wanted


def chat_tokens(
    tokenizer: Any,
    messages: Sequence[dict[str, str]],
    limit: int | None = None,
    what: str = "these messages",
) -> list[int]:
    """Return the prompt tokens of a conversation, which an answer is to follow.

    They are those of transformers' `apply_chat_template(messages, add_generation_prompt=True)`:
    the chat template renders the messages, and the whole is tokenised as one. Only what looks like
    a special token in a message's content stays text.

    Args:
        tokenizer: with a chat template.
        messages: with `role` and `content`.
        limit: tokens beyond which the prompt is refused, in memory that grows with them alone.
        what: the template is told to take, for error messages.

    Raises TierForceError where the template cannot take them, InvalidRequestError for a text that cannot
    be written as UTF-8, and ContextLengthError for one far longer than `limit`.
    """
    text, guard = _rendered(tokenizer, messages, what)
    if limit is not None:
        check_length(
            guard.plain(text),
            limit,
            lambda part: len(tokenizer(part, add_special_tokens=False).input_ids),
        )
    return guard.encode(text)


def tokens_around(
    tokenizer: Any, messages: Sequence[dict[str, str]], what: str
) -> tuple[list[int], list[int]]:
    """Return the tokens of what a chat template writes before and after `MARK`, each by itself.

    The messages have it once. Raises TierForceError for a template that leaves it out.
    """
    text, guard = _rendered(tokenizer, messages, what)
    before, mark, after = text.partition(MARK)
    if not mark:
        raise TierForceError(
            f"the tokenizer's chat template cannot take {what} (it leaves it out)."
        )
    return guard.encode(before), guard.encode(after)


def _rendered(
    tokenizer: Any, messages: Sequence[dict[str, str]], what: str
) -> tuple[str, SpecialTokenGuard]:
    """Return messages as the chat template writes them, and what tokenises that."""
    contents = [each["content"] for each in messages]
    for content in contents:
        check_whole_characters(content)
    guard = SpecialTokenGuard(tokenizer, contents)

    def write(contents: Sequence[str]) -> str:
        pairs = zip(messages, contents, strict=True)
        return render_chat(tokenizer, [{**each, "content": content} for each, content in pairs])

    try:
        return guard.render(contents, write), guard
    except Exception as error:  # jinja's, or whatever the template's own code raises
        raise TierForceError(
            f"the tokenizer's chat template cannot take {what} ({one_line(error)})."
        ) from error


class Template(ABC):
    """What stands around a text in a prompt."""

    @classmethod
    def plain(cls, tokenizer: Any) -> PlainTemplate:
        """Return what the tokenizer puts before any text, such as <s>: it is to be continued."""
        return PlainTemplate(prefix_tokens(tokenizer), [])

    @classmethod
    def chat(cls, tokenizer: Any, content: str = MARK) -> Template:
        """Return the tokenizer's chat template around a user's message, in which `MARK` is a text.

        Raises TierForceError where there is no chat template, or a broken one.
        """
        if not tokenizer.chat_template:
            raise TierForceError(
                "the tokenizer has no chat template: use an instruct model, or leave out `chat`."
            )
        template = _ChatTemplate(content)
        template.around(tokenizer)
        return template

    @classmethod
    def summary(cls, tokenizer: Any, instruction: str = INSTRUCTION) -> Template:
        """Ask for a summary, through the tokenizer's chat template where it has one.

        Raises TierForceError when that is broken.
        """
        if tokenizer.chat_template:
            return cls.chat(tokenizer, f"{MARK}\n\n{instruction}")
        after = plain_tokens(tokenizer, f"\n\n{instruction}\n\n")
        return PlainTemplate(prefix_tokens(tokenizer), after)

    @abstractmethod
    def around(self, tokenizer: Any) -> tuple[list[int], list[int]]:
        """Return the tokens before and after a text, each tokenised by itself.

        Raises TierForceError for a chat template that leaves the text out.
        """

    @abstractmethod
    def build(
        self, tokenizer: Any, text: str, room: int, keep_end: bool = False
    ) -> tuple[list[int], int]:
        """Return at most `room` prompt tokens, and how many of the text's were dropped.

        The text's end is dropped, or with `keep_end` its beginning. What looks like a special token
        in it is plain text. Raises InvalidRequestError when the template leaves no room for any of it.
        """


@dataclass(frozen=True)
class PlainTemplate(Template):
    """Tokens before and after a text."""

    before: list[int]
    after: list[int]

    def around(self, tokenizer: Any) -> tuple[list[int], list[int]]:
        return self.before, self.after

    def build(
        self, tokenizer: Any, text: str, room: int, keep_end: bool = False
    ) -> tuple[list[int], int]:
        text, dropped = clip(tokenizer, text, room, keep_end)
        tokens = plain_tokens(tokenizer, text)
        space = room - len(self.before) - len(self.after)
        if space < 1:
            raise _no_room(room, len(self.before) + len(self.after))
        excess = max(0, len(tokens) - space)
        kept = tokens[excess:] if keep_end else tokens[:space]
        return [*self.before, *kept, *self.after], dropped + excess

    def fit(self, tokenizer: Any, text: str, limit: int) -> list[int]:
        """Return the prompt with all of the text.

        Raises InvalidRequestError where it has far more than `limit` tokens.
        """
        check_whole_characters(text)
        check_length(text, limit, lambda part: len(plain_tokens(tokenizer, part)))
        return [*self.before, *plain_tokens(tokenizer, text), *self.after]


@dataclass(frozen=True)
class _ChatTemplate(Template):
    """A user's message in a chat template, rendered and tokenised as one with the text."""

    content: str  # of the message, in which `MARK` stands for the text

    def around(self, tokenizer: Any) -> tuple[list[int], list[int]]:
        return tokens_around(tokenizer, [_user(self.content)], _DOCUMENT)

    def build(
        self, tokenizer: Any, text: str, room: int, keep_end: bool = False
    ) -> tuple[list[int], int]:
        text, dropped = clip(tokenizer, text, room, keep_end)
        prompt, left = self._prompt(tokenizer, text), 0
        while (excess := len(prompt) - room) > 0:
            left = (left or len(plain_tokens(tokenizer, text))) - excess
            if left < 1:
                raise _no_room(room, len(prompt) - left - excess)
            text, cut = truncate_to(tokenizer, text, left, keep_end)
            dropped += cut
            prompt = self._prompt(tokenizer, text)  # whose tokens at the cut may be others
        return prompt, dropped

    def _prompt(self, tokenizer: Any, text: str) -> list[int]:
        return chat_tokens(tokenizer, [_user(self.content.replace(MARK, text))], what=_DOCUMENT)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _no_room(room: int, template: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"no room left: the context has {max(0, room)} tokens for the prompt, and the template "
        f"alone takes {template}. Use a longer `context` or fewer `max_new_tokens`."
    )
