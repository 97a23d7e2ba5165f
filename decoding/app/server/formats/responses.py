"""The body of OpenAI's Responses API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    model_validator,
)

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
from decoding.app.server.formats.chat import CallingPrompt, Effort, Message, TextPart, text_of
from decoding.app.server.formats.neutral_fields import (
    EMPTY_REASONING_FIELDS,
    FUNCTION_FIELDS,
    INPUT_CALL_FIELDS,
    INPUT_MESSAGE_FIELDS,
    INPUT_PART_FIELDS,
    REASONING_FIELDS,
    RESPONSE_FIELDS,
    TEXT_FIELDS,
)
from decoding.app.server.formats.response_format import TextFormat, parse_text_format
from decoding.app.server.formats.tools import (
    CalledFunction,
    CallId,
    Function,
    ToolCall,
    check_size_of_arguments,
)
from decoding.app.server.worker import limits
from decoding.grammars.grammar import Grammar
from decoding.text.tools.parser import BLANK_LINE

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
_TOOL_HINTS = {"function": "send its name, description and parameters beside type"}
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

    def add_to(self, messages: list[Message]) -> None:
        """Add the item to the messages of a chat completion.

        Text that follows a call is added to the call's message.
        """
        part = TextPart(type="text", text=text_of(self.content))
        last = messages[-1] if messages else None
        if not (self.role == "assistant" and last is not None and last.tool_calls):
            messages.append(Message(role=self.role, content=[part]))
        elif isinstance(last.content, list):
            last.content += [TextPart(type="text", text=BLANK_LINE), part]
        else:  # it has calls alone
            last.content = [part]


class InputCall(CalledFunction):
    """A call of a function: an item of an earlier response's output."""

    neutral = INPUT_CALL_FIELDS

    type: Literal["function_call"]
    call_id: CallId

    def add_to(self, messages: list[Message]) -> None:
        """Add the call to the assistant's message that it is a part of."""
        if not (messages and messages[-1].role == "assistant"):
            messages.append(Message(role="assistant"))
        last = messages[-1]
        if last.tool_calls is None:
            last.tool_calls = []
        function = CalledFunction(name=self.name, arguments=self.arguments)
        last.tool_calls.append(ToolCall(id=self.call_id, type="function", function=function))


class InputResult(Strict):
    """The result of a call."""

    neutral = INPUT_CALL_FIELDS

    type: Literal["function_call_output"]
    call_id: CallId
    output: str | Annotated[list[InputText], Field(fail_fast=True)]

    def add_to(self, messages: list[Message]) -> None:
        """Add the result as a message."""
        message = Message(role="tool", content=text_of(self.output), tool_call_id=self.call_id)
        messages.append(message)


class NoReasoning(Strict):
    """An item of reasoning that has none."""

    neutral = EMPTY_REASONING_FIELDS
    hints = dict.fromkeys(EMPTY_REASONING_FIELDS, "leave the reasoning out")

    type: Literal["reasoning"]

    def add_to(self, messages: list[Message]) -> None:
        """Add nothing."""


_ITEMS = ("message", "function_call", "function_call_output", "reasoning")  # their types


def _item(value: Any) -> Any:
    """Return an item of the input, which has a type and is yet to be validated."""
    if not isinstance(value, dict):
        raise ValueError("send an item: an object, such as a message with role and content")
    if value.get("type") not in (None, *_ITEMS):
        raise unsupported("type", hint=f"send items of type {', '.join(_ITEMS[:-1])}")
    return value


_Item = Annotated[
    Annotated[InputMessage, Tag("[message]")]  # no part of a field's name in an error
    | Annotated[InputCall, Tag("[function_call]")]
    | Annotated[InputResult, Tag("[function_call_output]")]
    | Annotated[NoReasoning, Tag("[reasoning]")],
    Discriminator(lambda item: f"[{item.get('type') or 'message'}]"),
    BeforeValidator(_item),
]


def _items(value: Any) -> Any:
    """Return the items of an input, which may be the text of a single message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list):
        items = (item for item in value if isinstance(item, dict))
        check_size_of_arguments(item.get("arguments") for item in items)
    return value


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


class FunctionTool(Function):
    """A tool: a function."""

    neutral = FUNCTION_FIELDS
    hints = _TOOL_HINTS

    type: Literal["function"]


def _tool(value: Any) -> Any:
    """Return a tool, yet to be validated."""
    if isinstance(value, dict) and value.get("type") != "function":
        raise unsupported("type", hint="send tools of type function")
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
    prompt_cache_key: _Label | None = None
    safety_identifier: _Label | None = None
    user: _Label | None = None


class FunctionPrompt(CallingPrompt):
    """The fields of a conversation that may call functions, which the response repeats."""

    tools: list[Annotated[FunctionTool, BeforeValidator(_tool)]] | None = Field(
        None, max_length=limits.TOOLS, fail_fast=True
    )

    @property
    def functions(self) -> Sequence[Function]:
        return self.tools or ()

    @property
    def repeated_choice(self) -> str | dict[str, str]:
        """Return the choice of a tool."""
        choice = self.choice
        return choice.mode if choice.name is None else {"type": "function", "name": choice.name}

    @property
    def repeated_tools(self) -> list[dict[str, Any]]:
        """Return the tools, of too long ones the names only."""
        tools = [{**tool.model_dump(), "strict": tool.strict or False} for tool in self.tools or ()]
        if len(json.dumps(tools)) > limits.REPEATED_CHARACTERS:
            return [{**tool, "description": None, "parameters": {}} for tool in tools]
        return tools


class ResponsesBody(GenerationBody, FunctionPrompt, RepeatedBody):
    """The body of a request for a response."""

    neutral = RESPONSE_FIELDS
    hints = _HINTS
    prompt_field = "input"

    input: Annotated[
        list[_Item],
        Field(min_length=1, max_length=limits.MESSAGES, fail_fast=True),
        BeforeValidator(_items, json_schema_input_type=str | list[_Item]),
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
        if all(isinstance(item, NoReasoning) for item in self.input):
            raise invalid("input", "send at least one message")
        if any(len(message.tool_calls or ()) > limits.TOOLS for message in self.messages):
            raise invalid("input", f"more than {limits.TOOLS} calls follow each other")
        if self.reasoning_effort is not None and self.reasoning is not None:
            raise invalid("reasoning_effort", "send it here or in reasoning")
        self.check_rendering(self.messages)
        return self

    @model_validator(mode="after")
    def check_logprobs(self) -> ResponsesBody:
        """Raise an error if `top_logprobs` is used without log-probabilities, or with tools.

        Items of calls have none.
        """
        if self.top_logprobs and self.num_top_logprobs is None:
            raise invalid("top_logprobs", f'it requires include: ["{_LOGPROBS}"]')
        if self.usable_functions and self.num_top_logprobs is not None:
            raise invalid("include", f"{_LOGPROBS} is not supported with tools: send one of them")
        return self

    @cached_property
    def messages(self) -> Sequence[Message]:
        """Return the conversation, with the instructions as its system message."""
        messages = list[Message]()
        if self.instructions is not None:
            messages.append(Message(role="system", content=self.instructions))
        for item in self.input:
            item.add_to(messages)
        return messages

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
            "tool_choice": self.repeated_choice,
            "tools": self.repeated_tools,
        }
