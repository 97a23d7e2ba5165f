"""Prompt tokens of a text or of messages: the template around them, and truncation to fit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any

from decoding.text.chat_template import ChatRendering, render_chat
from decoding.text.encoding import (
    SpecialTokenGuard,
    check_length,
    check_whole_characters,
    clip,
    plain_tokens,
    prefix_tokens,
    truncate_to,
)
from decoding.text.instructions import INSTRUCTION, PromptFormat
from decoding.text.tools.strings import strings_in, with_strings
from offload.errors import InvalidRequestError, TierForceError, one_line

_DOCUMENT = "a document"
# placeholder of a text in a template; it is random, so that no text has it
MARK = f"\ue000{token_hex(8)}\ue000"
JOIN_TOKENS = 8  # those that may change where strings are joined


class ToolsError(TierForceError):
    """A chat template does not support the tools of a request."""


def chat_tokens(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    limit: int | None = None,
    what: str = "these messages",
    rendering: ChatRendering | None = None,
) -> list[int]:
    """Return the prompt tokens of a conversation, up to the beginning of the next answer.

    They are those of transformers' `apply_chat_template(messages, add_generation_prompt=True)`:
    the chat template renders the messages, and the result is tokenized as one text. The exception
    are special tokens in the content of messages, in calls and in tools, which stay plain text.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: messages with `role` and `content`, and perhaps calls of tools and their results.
        limit: the maximum number of tokens of the prompt; memory is proportional to it.
        what: the name of the messages in error messages.
        rendering: variables of the template, tools, and whether the last message is continued.

    Raises TierForceError if the template rejects the messages, ToolsError if it rejects only the
    tools, InvalidRequestError for a text that cannot be encoded as UTF-8, and ContextLengthError
    for a prompt far longer than `limit`.
    """
    text, guard = _rendered(tokenizer, messages, what, rendering)
    if limit is not None:
        check_length(
            guard.plain(text),
            limit,
            lambda part: len(tokenizer(part, add_special_tokens=False).input_ids),
        )
    return guard.encode(text)


def tokens_around(
    tokenizer: Any, messages: Sequence[dict[str, Any]], what: str
) -> tuple[list[int], list[int]]:
    """Return the tokens before and after `MARK` in the rendered messages, tokenized separately.

    `MARK` occurs once in the messages. Raises TierForceError for a template that omits it.
    """
    text, guard = _rendered(tokenizer, messages, what)
    before, mark, after = text.partition(MARK)
    if not mark:
        raise TierForceError(
            f"the tokenizer's chat template does not support {what} (it omits it)."
        )
    return guard.encode(before), guard.encode(after)


def system_messages(system: str | None) -> list[dict[str, str]]:
    """Return the messages that precede a conversation: the system message, if there is one."""
    return [] if system is None else [{"role": "system", "content": system}]


def check_system(tokenizer: Any, system: str | None) -> None:
    """Raise TierForceError if a tokenizer's chat template does not render a system message."""
    if system is None:
        return
    if not tokenizer.chat_template:
        raise TierForceError(
            "the tokenizer has no chat template: use an instruct model, or leave out `system`."
        )
    messages = [*system_messages(MARK), {"role": "user", "content": "a"}]
    tokens_around(tokenizer, messages, "a system message")


def _rendered(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    what: str,
    rendering: ChatRendering | None = None,
) -> tuple[str, SpecialTokenGuard]:
    """Return the rendered messages, and the guard that tokenizes them."""
    rendering = rendering or ChatRendering()
    free = [list(map(_free_parts, messages)), list(rendering.tools)]
    contents = strings_in(free)
    for content in contents:
        check_whole_characters(content)
    guard = SpecialTokenGuard(tokenizer, contents)

    def render(contents: Sequence[str]) -> str:
        parts, tools = with_strings(free, iter(contents))
        own = [_with_parts(*each) for each in zip(messages, parts, strict=True)]
        return render_chat(tokenizer, own, replace(rendering, tools=tools))

    try:
        return guard.render(contents, render), guard
    except Exception as error:  # jinja errors, or whatever the template's own code raises
        kind, at_fault = TierForceError, what
        if rendering.tools:
            _rendered(tokenizer, messages, what, replace(rendering, tools=()))
            kind, at_fault = ToolsError, "these tools"
        raise kind(
            f"the tokenizer's chat template does not support {at_fault} ({one_line(error)})."
        ) from error


def _free_parts(message: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a message that may have any text: all but its role and names."""
    calls = message.get("tool_calls", ())
    arguments = [[call.get("id"), call["function"]["arguments"]] for call in calls]
    return [message["content"], message.get("tool_call_id"), arguments]


def _with_parts(message: Mapping[str, Any], parts: Sequence[Any]) -> dict[str, Any]:
    """Return a message with other parts, in the order of `_free_parts`."""
    content, result_of, calls = parts
    own = {**message, "content": content}
    if result_of is not None:
        own["tool_call_id"] = result_of
    if calls:
        own["tool_calls"] = []
    for call, (call_id, arguments) in zip(message.get("tool_calls", ()), calls, strict=True):
        changed = {**call, "function": {**call["function"], "arguments": arguments}}
        if call_id is not None:
            changed["id"] = call_id
        own["tool_calls"].append(changed)
    return own


class Template(ABC):
    """The part of a prompt that surrounds a text."""

    @classmethod
    def plain(cls, tokenizer: Any) -> PlainTemplate:
        """Return the tokenizer's own prefix, such as <s>, for a text to be continued."""
        return PlainTemplate(prefix_tokens(tokenizer), [])

    @classmethod
    def chat(cls, tokenizer: Any, content: str = MARK, system: str | None = None) -> Template:
        """Return the tokenizer's chat template around a user message, after a system message.

        In `content`, `MARK` is the placeholder of the text. Raises TierForceError if there is no
        chat template, or a broken one.
        """
        if not tokenizer.chat_template:
            raise TierForceError(
                "the tokenizer has no chat template: use an instruct model, or leave out `chat`."
            )
        template = _ChatTemplate(content, system)
        template.around(tokenizer)
        return template

    @classmethod
    def summary(
        cls, tokenizer: Any, instruction: str = INSTRUCTION, format: PromptFormat | None = None
    ) -> Template:
        """Return a prompt for a summary; it uses the tokenizer's chat template if there is one.

        Raises TierForceError if the chat template is broken.
        """
        format, is_plain = format or PromptFormat(), not tokenizer.chat_template
        before, after = format.around(instruction, is_plain)
        if not is_plain:
            return cls.chat(tokenizer, f"{before}{MARK}{after}", format.system)
        prefix = [*prefix_tokens(tokenizer), *plain_tokens(tokenizer, before)]
        return PlainTemplate(prefix, plain_tokens(tokenizer, after))

    @abstractmethod
    def around(self, tokenizer: Any) -> tuple[list[int], list[int]]:
        """Return the tokens before and after a text, tokenized separately.

        Raises TierForceError for a chat template that omits the text.
        """

    @abstractmethod
    def build(
        self, tokenizer: Any, text: str, max_tokens: int, keep_end: bool = False
    ) -> tuple[list[int], int]:
        """Return at most `max_tokens` prompt tokens, and the number of dropped tokens of the text.

        The end of the text is dropped, or with `keep_end` its beginning. Special tokens in it are
        plain text. Raises InvalidRequestError if the template leaves no room for the text.
        """


@dataclass(frozen=True)
class PlainTemplate(Template):
    """Fixed tokens before and after a text."""

    before: list[int]
    after: list[int]

    def around(self, tokenizer: Any) -> tuple[list[int], list[int]]:
        return self.before, self.after

    def build(
        self, tokenizer: Any, text: str, max_tokens: int, keep_end: bool = False
    ) -> tuple[list[int], int]:
        text, dropped = clip(tokenizer, text, max_tokens, keep_end)
        tokens = plain_tokens(tokenizer, text)
        room = max_tokens - len(self.before) - len(self.after)
        if room < 1:
            raise _no_room_error(max_tokens, len(self.before) + len(self.after))
        excess = max(0, len(tokens) - room)
        truncated = tokens[excess:] if keep_end else tokens[:room]
        return [*self.before, *truncated, *self.after], dropped + excess

    def fit(self, tokenizer: Any, text: str, limit: int) -> list[int]:
        """Return the prompt with the whole text.

        Raises ContextLengthError if the text has far more than `limit` tokens.
        """
        check_whole_characters(text)
        check_length(text, limit, lambda part: len(plain_tokens(tokenizer, part)))
        return [*self.before, *plain_tokens(tokenizer, text), *self.after]


@dataclass(frozen=True)
class _ChatTemplate(Template):
    """A user message in a chat template, rendered and tokenized together with the text."""

    content: str  # the message, with `MARK` in place of the text
    system: str | None

    def around(self, tokenizer: Any) -> tuple[list[int], list[int]]:
        return tokens_around(tokenizer, self._messages(self.content), _DOCUMENT)

    def build(
        self, tokenizer: Any, text: str, max_tokens: int, keep_end: bool = False
    ) -> tuple[list[int], int]:
        text, dropped = clip(tokenizer, text, max_tokens, keep_end)
        prompt, room = self._prompt(tokenizer, text), 0
        while (excess := len(prompt) - max_tokens) > 0:
            room = (room or len(plain_tokens(tokenizer, text))) - excess
            if room < 1:
                raise _no_room_error(max_tokens, len(prompt) - room - excess)
            text, count = truncate_to(tokenizer, text, room, keep_end)
            dropped += count
            # the number of tokens at the cut may have changed
            prompt = self._prompt(tokenizer, text)
        return prompt, dropped

    def _prompt(self, tokenizer: Any, text: str) -> list[int]:
        messages = self._messages(self.content.replace(MARK, text))
        return chat_tokens(tokenizer, messages, what=_DOCUMENT)

    def _messages(self, content: str) -> list[dict[str, str]]:
        return [*system_messages(self.system), {"role": "user", "content": content}]


def _no_room_error(max_tokens: int, template: int) -> InvalidRequestError:
    if max_tokens < 1:
        return InvalidRequestError(
            "no room left: the answer may take all of the context, and the prompt needs some. Use "
            "a longer `context` or fewer `max_new_tokens`."
        )
    return InvalidRequestError(
        f"no room left: the context has {max_tokens} tokens for the prompt, and template "
        f"and instruction alone take {template}. Shorten the instruction, or use a longer "
        "`context` or fewer `max_new_tokens`."
    )
