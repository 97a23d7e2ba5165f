"""The body of OpenAI's Responses API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from decoding.app.server.formats.body import (
    MAX_TOP_LOGPROBS,
    OTHER_FORMATS,
    GenerationBody,
    JsonObject,
    MaxTokens,
    Strict,
    invalid,
    unsupported,
)
from decoding.app.server.formats.chat import ChatPrompt, Effort, Message
from decoding.app.server.formats.neutral_fields import (
    INPUT_MESSAGE_FIELDS,
    INPUT_PART_FIELDS,
    REASONING_FIELDS,
    RESPONSE_FIELDS,
    TEXT_FIELDS,
)
from decoding.app.server.formats.response_format import TextFormat, parse_text_format
from decoding.app.server.worker import limits
from decoding.grammars.grammar import Grammar

_LOGPROBS = "message.output_text.logprobs"
_HINTS = {
    **dict.fromkeys((*OTHER_FORMATS, "response_format"), "use text.format, or structured_outputs"),
    **dict.fromkeys(
        ("conversation", "previous_response_id"), "send the whole conversation in `input`"
    ),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "use max_output_tokens"),
    "messages": "use input",
    "prompt": "use instructions and input",
}
_IN_REASONING = ("type", "id", "status")  # fields of an item of reasoning that has none
_MAX_PAIRS, _MAX_NAME, _MAX_VALUE = 16, 64, 512  # metadata, as in OpenAI's API

# all but log-probabilities are parts of items that an answer here does not have
_Include = Literal[
    "message.output_text.logprobs",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
_Includes = Annotated[list[_Include], Field(max_length=20, fail_fast=True)]
_Label = Annotated[str, Field(max_length=_MAX_VALUE)]


class InputText(Strict):
    """A part of a message."""

    neutral = INPUT_PART_FIELDS

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(Strict):
    """A message of a conversation: an item of the input, or of an earlier response's output."""

    neutral = INPUT_MESSAGE_FIELDS

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], Field(fail_fast=True)]

    def as_message(self) -> Message:
        """Return the message as one of a chat completion."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return Message(role=self.role, content=text)


def _item(value: Any) -> Any:
    """Return a message of the input, yet to be validated; None for an empty item of reasoning."""
    if not isinstance(value, dict):
        raise ValueError("send a message: an object with role and content")
    kind = value.get("type")
    if kind == "reasoning":
        for name, own in value.items():
            if name not in _IN_REASONING and own not in (None, "", []):
                raise unsupported(name, hint="leave the reasoning out")
        return None
    if kind not in (None, "message"):
        raise unsupported("type", hint="send items of type message")
    return value


def _items(value: Any) -> Any:
    """Return the items of an input, which may be the text of a single message."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _metadata(value: Any) -> dict[str, str] | None:
    """Return metadata. Checked by hand: pydantic would return names of any length in an error."""
    if value is None:
        return None
    if (
        not isinstance(value, dict)
        or len(value) > _MAX_PAIRS
        or any(len(name) > _MAX_NAME for name in value)
        or any(not isinstance(own, str) or len(own) > _MAX_VALUE for own in value.values())
    ):
        raise ValueError(
            f"send an object with at most {_MAX_PAIRS} strings of up to {_MAX_VALUE} characters, "
            f"by names of up to {_MAX_NAME}"
        )
    return value


class TextOptions(Strict):
    """The format of the answer's text."""

    neutral = TEXT_FIELDS

    format: Annotated[
        TextFormat | None, PlainValidator(parse_text_format, json_schema_input_type=JsonObject)
    ] = None


class ReasoningOptions(Strict):
    """Options of reasoning."""

    neutral = REASONING_FIELDS

    effort: Effort | None = None


class RepeatedBody(Strict):
    """The fields that the response repeats, and that change nothing else."""

    metadata: Annotated[
        dict[str, str] | None,
        PlainValidator(_metadata, json_schema_input_type=dict[str, str] | None),
    ] = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: _Label | None = None
    safety_identifier: _Label | None = None
    tool_choice: Literal["none", "auto"] | None = None
    user: _Label | None = None


class ResponsesBody(GenerationBody, ChatPrompt, RepeatedBody):
    """The body of a request for a response."""

    neutral = RESPONSE_FIELDS
    hints = _HINTS
    prompt_field = "input"

    input: Annotated[
        list[Annotated[InputMessage | None, BeforeValidator(_item)]],
        Field(min_length=1, max_length=limits.MESSAGES, fail_fast=True),
        BeforeValidator(_items, json_schema_input_type=str | list[InputMessage]),
    ]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    include: _Includes | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None

    @model_validator(mode="after")
    def check_conversation(self) -> ResponsesBody:
        """Raise an error for no message, contradicting fields, or no message to continue."""
        if not any(self.input):
            raise invalid("input", "send at least one message")
        if self.reasoning_effort is not None and self.reasoning is not None:
            raise invalid("reasoning_effort", "send it here or in reasoning")
        self.check_rendering(self.messages)
        return self

    @model_validator(mode="after")
    def check_logprobs(self) -> ResponsesBody:
        """Raise an error if `top_logprobs` is used without log-probabilities."""
        if self.top_logprobs and self.num_top_logprobs is None:
            raise invalid("top_logprobs", f'it requires include: ["{_LOGPROBS}"]')
        return self

    @cached_property
    def messages(self) -> Sequence[Message]:
        """Return the conversation, with the instructions as its system message."""
        messages = [item.as_message() for item in self.input if item is not None]
        if self.instructions is None:
            return messages
        return [Message(role="system", content=self.instructions), *messages]

    @property
    def effort(self) -> Effort | None:
        return self.reasoning_effort if self.reasoning is None else self.reasoning.effort

    @property
    def answer_format(self) -> tuple[str, Grammar] | None:
        own = self.text.format if self.text is not None else None
        return None if own is None or own.grammar is None else ("text.format", own.grammar)

    @property
    def token_limit(self) -> int | None:
        return self.n_predict if self.max_output_tokens is None else self.max_output_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if _LOGPROBS in (self.include or ()) else None

    @property
    def repeated(self) -> dict[str, Any]:
        maximum = limits.REPEATED_CHARACTERS
        own = self.text.format if self.text is not None else None
        format = {"type": "text"} if own is None else own.source
        if len(json.dumps(format)) > maximum:
            format = {**format, "schema": {}}
        return {
            **self.model_dump(include=set(RepeatedBody.model_fields)),
            "instructions": self.instructions if len(self.instructions or "") <= maximum else None,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": self.effort, "summary": None},
            "text": {
                "format": format,
                "verbosity": "medium",
            },
            "tool_choice": self.tool_choice or "auto",
        }
