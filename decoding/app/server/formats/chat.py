"""The body of a chat completion."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from decoding.app.server.formats.body import (
    MAX_TOP_LOGPROBS,
    Body,
    JsonObject,
    MaxTokens,
    Strict,
    invalid,
)
from decoding.app.server.formats.neutral_fields import CHAT_FIELDS, MESSAGE_FIELDS, PART_FIELDS
from decoding.app.server.formats.tools import (
    CallId,
    Choice,
    Function,
    Tool,
    ToolCall,
    ToolChoice,
    check_size_of_arguments,
)
from decoding.app.server.worker import limits
from decoding.text.chat_template import ChatRendering, Variables, is_reserved

# names of participants, as in OpenAI's API, without characters of special tokens
_NAME = re.compile(r"[^\s<|\\/>\[\]]{1,64}")
_WORDS = re.compile(r"[\w .,:;/()'+-]{0,100}")  # no character of a special token
_MAX_NUMBER = 1_000_000  # variables have no larger ones: a template may repeat something as often
_MAX_VARIABLES = 20

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class TextPart(Strict):
    """A part of a message."""

    neutral = PART_FIELDS

    type: Literal["text"]
    text: str


def text_of(content: str | list[Any]) -> str:
    """Return the text of a content, or of all its parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _name(name: str | None) -> str | None:
    if name is not None and not _NAME.fullmatch(name):
        raise ValueError("a name has 1 to 64 characters, without blanks and any of < > | [ ] / \\")
    return name


_Calls = Annotated[list[ToolCall], Field(max_length=limits.TOOLS, fail_fast=True)]


def _messages(messages: Any) -> Any:
    """Return messages, before they are validated: arguments of calls are yet to be parsed."""
    arguments = list[Any]()
    for message in messages if isinstance(messages, list) else ():
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            arguments.append(function.get("arguments") if isinstance(function, dict) else None)
    check_size_of_arguments(arguments)
    return messages


class Message(Strict):
    """A message of a conversation."""

    neutral = MESSAGE_FIELDS

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: Annotated[str | None, AfterValidator(_name)] = None  # the template may have it
    tool_calls: _Calls | None = None
    tool_call_id: CallId | None = None

    @model_validator(mode="after")
    def check_role(self) -> Message:
        """Raise an error for what messages of this role do not have."""
        if self.tool_calls and self.role != "assistant":
            raise invalid("tool_calls", "only messages of the assistant have calls")
        if self.tool_call_id and self.role != "tool":
            raise invalid("tool_call_id", "only messages with the role tool answer a call")
        if self.content is None and self.role not in ("assistant", "tool"):
            raise invalid("content", "send a string, or a list of parts")
        return self

    def as_template(self) -> dict[str, Any]:
        """Return the message in the format of chat templates."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.as_template() for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message

    @property
    def text(self) -> str:
        """Return the text of all parts."""
        return text_of(self.content or "")


def _variables(value: Any) -> Variables | None:
    """Return the variables of a chat template.

    Strings are short and plain, since what a template writes may be special tokens.
    """
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > _MAX_VARIABLES:
        raise ValueError(f"send an object with at most {_MAX_VARIABLES} variables of the template")
    for name, own in value.items():
        if not name.isidentifier() or len(name) > 100 or is_reserved(name):
            raise ValueError(f"{name[:100]!a} cannot be a variable of the template")
        is_number = isinstance(own, bool | int | float) and abs(own) <= _MAX_NUMBER
        is_text = isinstance(own, str) and len(own) <= 100 and _WORDS.fullmatch(own)
        if not (own is None or is_number or is_text):
            raise ValueError(
                f"{name} must be true, false, a number of up to {_MAX_NUMBER:,} or a short text "
                "without characters of special tokens"
            )
    return value


class ChatPrompt(Strict):
    """The fields of a conversation, from which its prompt is rendered."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[
        Variables | None, PlainValidator(_variables, json_schema_input_type=JsonObject)
    ] = None
    reasoning_effort: Effort | None = None

    def check_rendering(self, messages: Sequence[Message]) -> None:
        """Raise an error for contradicting fields, or no message to continue."""
        adds, continues = self.add_generation_prompt, bool(self.continue_final_message)
        if adds is not None and adds == continues:
            raise invalid(
                "add_generation_prompt",
                "send false with continue_final_message: true, and true without it",
            )
        last = messages[-1]
        is_answer = last.role == "assistant" and last.text.strip() and not last.tool_calls
        if continues and not is_answer:
            raise invalid(
                "continue_final_message",
                "the last message must be the assistant's, have text, and no tool_calls",
            )
        if self.effort and "reasoning_effort" in (self.chat_template_kwargs or {}):
            raise invalid("reasoning_effort", "send it here or in chat_template_kwargs")

    @property
    def functions(self) -> Sequence[Function]:
        """Return the tools, all of which are functions."""
        return ()

    @property
    def usable_functions(self) -> Sequence[Function]:
        """Return those of the functions that are in the prompt."""
        return self.functions

    @property
    def effort(self) -> Effort | None:
        """Return the template's variable `reasoning_effort`."""
        return self.reasoning_effort

    @property
    def rendering(self) -> ChatRendering:
        """Return how the chat template renders the messages."""
        variables = dict(self.chat_template_kwargs or {})
        if self.effort is not None:
            variables["reasoning_effort"] = self.effort
        tools = tuple(function.as_template() for function in self.usable_functions)
        return ChatRendering(bool(self.continue_final_message), tuple(variables.items()), tools)


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=limits.MESSAGES, fail_fast=True),
    BeforeValidator(_messages),
]


class ToolPrompt(ChatPrompt):
    """The fields of a conversation that may call tools."""

    tools: list[Tool] | None = Field(None, max_length=limits.TOOLS, fail_fast=True)

    @property
    def functions(self) -> Sequence[Function]:
        return [tool.function for tool in self.tools or ()]


class CallingPrompt(ChatPrompt):
    """The fields of a conversation whose answer may call tools."""

    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def check_tools(self) -> CallingPrompt:
        """Raise an error for two functions of a name, and a choice of none that there is."""
        names = [function.name for function in self.functions]
        if len(set(names)) < len(names):
            raise invalid("tools", "two functions have the same name")
        choice = self.choice
        if choice.mode == "required":
            if not names:
                raise invalid("tool_choice", "no tools to choose from: send tools")
            if choice.name is not None and choice.name not in names:
                raise invalid(
                    "tool_choice", f"no function in tools has the name {choice.name[:100]!a}"
                )
        return self

    @property
    def usable_functions(self) -> Sequence[Function]:
        return () if self.choice.mode == "none" else self.functions

    @property
    def has_many_calls(self) -> bool:
        """Return whether the answer may have more than one call."""
        return self.parallel_tool_calls is not False and self.choice.name is None

    @property
    def choice(self) -> ToolChoice:
        """Return whether the answer may call tools, or has to."""
        return self.tool_choice or ToolChoice()


class ChatBody(Body, ToolPrompt, CallingPrompt):
    """The body of a chat completion."""

    neutral = CHAT_FIELDS
    prompt_field = "messages"

    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def check_continuation(self) -> ChatBody:
        """Raise an error for contradicting fields, or no message to continue."""
        self.check_rendering(self.messages)
        return self

    @model_validator(mode="after")
    def check_logprobs(self) -> ChatBody:
        """Raise ValueError if `top_logprobs` is used without `logprobs`."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "it requires logprobs: true")
        return self

    @property
    def token_limit(self) -> int | None:
        own = self.max_completion_tokens
        return super().token_limit if own is None else own

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
