"""Tools in requests, and calls of tools in responses."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator
from pydantic_core import from_json

from decoding.app.server.formats.body import Strict
from decoding.app.server.formats.neutral_fields import CALL_FIELDS, PART_FIELDS
from decoding.text.tools.parser import ToolCallDelta

_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)  # no character of a special token
_MAX_SCHEMA = 1 << 18  # characters of a function's
_MAX_ARGUMENTS = 1 << 20  # characters of those of all calls in a request
_MODES = {"none": "none", "auto": "auto", "required": "required", "any": "required"}


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("send 1 to 128 letters, digits or characters of _ . : / -")
    return name


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(json.dumps(schema, allow_nan=False))
    except ValueError:
        raise ValueError("NaN and Infinity are not JSON") from None
    if size > _MAX_SCHEMA:
        raise ValueError(f"send a schema of at most {_MAX_SCHEMA:,} characters")
    if schema.get("type") not in (None, "object"):
        raise ValueError("arguments are an object: send a schema with type: object")
    return {name: own for name, own in schema.items() if own is not None}


def _arguments(arguments: Any) -> dict[str, Any] | str:
    """Return the arguments of a call, which clients send as JSON in a string.

    What is no object stays a string: the model may have written it, and see what it wrote.
    """
    if arguments is None:
        return {}
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        raise ValueError("send a JSON object in a string")
    try:
        value = from_json(arguments or "{}", cache_strings="none")  # limits the nesting
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else {} if value is None else arguments


Name = Annotated[str, AfterValidator(_name)]
CallId = Annotated[str, Field(max_length=256)]


class Function(Strict):
    """A function that the model may call."""

    neutral = PART_FIELDS

    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_schema)] | None = None
    strict: bool | None = None  # whether arguments must be valid

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """Return the JSON schema of the arguments."""
        return self.parameters or {"type": "object", "properties": {}}

    def as_template(self) -> dict[str, Any]:
        """Return the function as a tool in the format of chat templates."""
        schema = self.schema_of_arguments
        own = {
            "name": self.name,
            "description": self.description or "",  # some templates need one, and properties
            "parameters": {**schema, "properties": schema.get("properties", {})},
        }
        return {"type": "function", "function": own}


class Tool(Strict):
    """A tool: a function."""

    neutral = PART_FIELDS

    type: Literal["function"]
    function: Function


class CalledFunction(Strict):
    """The function of a call, with arguments."""

    name: Name
    arguments: Annotated[
        dict[str, Any] | str,
        PlainValidator(_arguments, json_schema_input_type=str | dict[str, Any] | None),
    ] = Field(default_factory=dict)


class ToolCall(Strict):
    """A call in a message of the assistant."""

    neutral = CALL_FIELDS

    id: CallId | None = None
    type: Literal["function"] | None = None
    function: CalledFunction

    def as_template(self) -> dict[str, Any]:
        """Return the call in the format of chat templates."""
        own = {"type": "function", "function": self.function.model_dump()}
        return own if self.id is None else {"id": self.id, **own}


@dataclass(frozen=True)
class ToolChoice:
    """Whether the answer may call tools ("none", "auto"), or has to ("required"), and which."""

    mode: str = "auto"
    name: str | None = None  # the only function that may be called


def _choice(value: Any) -> ToolChoice:
    if isinstance(value, dict) and len(value) == 1:
        value = value.get("type")  # a mode
    if isinstance(value, str) and value in _MODES:
        return ToolChoice(_MODES[value])
    if isinstance(value, dict) and value.get("type") == "function" and len(value) == 2:
        own = value.get("function")
        # the Responses API's has the name itself
        name = own.get("name") if isinstance(own, dict) and len(own) == 1 else value.get("name")
        if isinstance(name, str):
            return ToolChoice("required", name)
    raise ValueError(
        'send none, auto, required, or {"type": "function", "function": {"name": "NAME"}}, which '
        'for a response is {"type": "function", "name": "NAME"}'
    )


Choice = Annotated[ToolChoice, PlainValidator(_choice, json_schema_input_type=str | dict[str, Any])]


def check_size_of_arguments(arguments: Iterable[Any]) -> None:
    """Raise ValueError for too many characters in all calls, whose arguments are yet to be parsed.

    What is no string is left to the validation of each call.
    """
    total = sum(len(own) for own in arguments if isinstance(own, str))
    if total > _MAX_ARGUMENTS:
        raise ValueError(
            f"the arguments of all calls have {total:,} characters, more than {_MAX_ARGUMENTS:,}"
        )


def new_call_id() -> str:
    """Return an id of nine characters: templates of Mistral models accept no others."""
    return secrets.token_hex(5)[:9]


def formatted_calls(calls: Iterable[ToolCallDelta], has_index: bool) -> list[dict[str, Any]]:
    """Return the calls of a message, or parts of calls in a chunk of a stream.

    A call's first part gives it an id. `has_index`: in a stream.
    """
    formatted = list[dict[str, Any]]()
    for call in calls:
        own: dict[str, Any] = {"index": call.index} if has_index else {}
        function = {"arguments": call.arguments}
        if call.name is not None:
            own |= {"id": new_call_id(), "type": "function"}
            function = {"name": call.name, **function}
        formatted.append({**own, "function": function})
    return formatted
