"""The bodies of requests in OpenAI's format, with validation.

Unsupported fields that would change an answer are refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)

from decoding.app.server.http.formats import parse_response_format, parse_structured_outputs
from decoding.app.server.worker import limits
from decoding.grammars.grammar import Grammar
from decoding.speculation.sampling import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_REPETITION,
    MIN_REPETITION,
)

_Accepted = Mapping[str, tuple[Any, ...] | None]
# accepted fields that change no answer, and their accepted values; None: any value
_ACCEPTED: _Accepted = {
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": None,
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "safety_identifier": None,
    "service_tier": None,
    "store": None,
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "user": None,
}
# fields of other servers that restrict an answer
_OTHER_FORMATS = {"format", "grammar", "json_schema", "regex"} | {
    f"guided_{name}" for name in ("json", "regex", "choice", "grammar")
}
MAX_TOP_LOGPROBS = 20
_MAX_BIASES, _ID_DIGITS = 10_000, 9

_Stop = Annotated[str, Field(min_length=1, max_length=limits.STOP_CHARACTERS)]
_Stops = Annotated[list[_Stop], Field(max_length=limits.STOPS, fail_fast=True)]


class _Strict(BaseModel):
    """A JSON object whose fields are all supported, or do not change the answer."""

    model_config = ConfigDict(strict=True)

    accepted: ClassVar[_Accepted] = {}

    @model_validator(mode="before")
    @classmethod
    def check_supported(cls, data: Any) -> Any:
        """Raise ValueError for the first unsupported field; null is accepted for any field."""
        if isinstance(data, dict):
            for name, value in data.items():
                values = cls.accepted.get(name, ())
                if not (name in cls.model_fields or values is None or value in (None, *values)):
                    shown = name if name.isidentifier() and len(name) <= 100 else ascii(name[:100])
                    hint = "leave it out"
                    if name in _OTHER_FORMATS:
                        hint = "use response_format, or structured_outputs"
                    raise ValueError(f"{shown} is not supported by this server: {hint}")
        return data


class StreamOptions(_Strict):
    """What a stream contains besides the answer."""

    accepted = {"include_obfuscation": (False,)}

    include_usage: bool | None = None


def _single(prompt: Any) -> str | list[int]:
    """Return a prompt, also if it is the only one in a list.

    Checked by hand: for a union, pydantic would report an error for each number.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise ValueError(f"{len(prompt)} prompts in one request: send one")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or any(type(token) is not int for token in prompt):
        raise ValueError("send a string or a list of token ids")
    return prompt


def _by_token(bias: Any) -> dict[int, float] | None:
    """Return biases by token id. Checked by hand, as in `_single`."""
    if bias is None:
        return None
    if not isinstance(bias, dict) or len(bias) > _MAX_BIASES:
        raise ValueError(f"send an object with at most {_MAX_BIASES:,} numbers by token id")
    for token, value in bias.items():
        if not token.isdecimal() or len(token) > _ID_DIGITS or type(value) not in (int, float):
            raise ValueError(f"{token[:100]!a} must be a token id with a number")
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise ValueError(f"the bias of token {token} must be from -{MAX_BIAS} to {MAX_BIAS}")
    return {int(token): value for token, value in bias.items()}


class _SamplingBody(_Strict):
    """The fields that are options of sampling."""

    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**63)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION, le=MAX_REPETITION)
    presence_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    logit_bias: Annotated[dict[int, float] | None, PlainValidator(_by_token)] = None


class _Body(_SamplingBody):
    """The common fields of chat and plain completions."""

    accepted = _ACCEPTED

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**63)
    stop: _Stop | _Stops | None = None
    response_format: Annotated[Grammar | None, PlainValidator(parse_response_format)] = None
    structured_outputs: Annotated[Grammar | None, PlainValidator(parse_structured_outputs)] = None

    @field_validator("structured_outputs", mode="after")
    @classmethod
    def check_one_grammar(cls, value: Grammar | None, info: ValidationInfo) -> Grammar | None:
        """Raise ValueError for two grammars."""
        if value is not None and info.data.get("response_format") is not None:
            raise ValueError("send this or response_format, not both")
        return value

    @property
    def grammar(self) -> tuple[str, Grammar] | None:
        """Return the field that has a grammar of the answer, and the grammar; None without one."""
        if self.structured_outputs is not None:
            return "structured_outputs", self.structured_outputs
        return None if self.response_format is None else ("response_format", self.response_format)

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """Return the field that limits the new tokens, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """Return the number of top log-probabilities per token; None: no log-probabilities."""
        raise NotImplementedError


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """A message of a conversation."""

    accepted = {"name": None, "annotations": ([],), "tool_calls": ([],)}

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    def as_template(self) -> dict[str, str]:
        """Return the message in the format of chat templates."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "".join(part.text for part in self.content)}


class ChatBody(_Body):
    """The body of a chat completion."""

    messages: list[Message] = Field(min_length=1, max_length=limits.MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**63)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def check_logprobs(self) -> ChatBody:
        """Raise ValueError if `top_logprobs` is used without `logprobs`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs: true")
        return self

    @property
    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().token_limit
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(_Body):
    """The body of a completion, whose prompt is a string or token ids."""

    prompt: Annotated[str | list[int], PlainValidator(_single)]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs


AnyBody = ChatBody | CompletionBody
