"""What all bodies of requests have in common: validation, and the fields of a generation.

Unsupported fields that would change an answer are refused, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from decoding.app.server.formats.neutral_fields import STREAM_FIELDS, Neutral
from decoding.app.server.formats.response_format import (
    parse_response_format,
    parse_structured_outputs,
)
from decoding.app.server.worker import limits
from decoding.grammars.grammar import Grammar
from decoding.speculation.sampling import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_REPETITION,
    MIN_REPETITION,
)

# fields of other servers that restrict an answer
OTHER_FORMATS = {"format", "grammar", "json_schema", "regex"} | {
    f"guided_{name}" for name in ("json", "regex", "choice", "grammar")
}
MAX_TOP_LOGPROBS = 20
_MAX_BIASES, _ID_DIGITS = 10_000, 9

JsonObject = dict[str, Any] | None
_Stop = Annotated[str, Field(min_length=1, max_length=limits.STOP_CHARACTERS)]
_Stops = Annotated[list[_Stop], Field(max_length=limits.STOPS, fail_fast=True)]


class Strict(BaseModel):
    """A JSON object whose fields are all supported, or do not change the answer."""

    model_config = ConfigDict(strict=True)

    neutral: ClassVar[Neutral] = {}
    hints: ClassVar[Mapping[str, str]] = {}  # advice per unsupported field

    @model_validator(mode="before")
    @classmethod
    def check_supported(cls, data: Any) -> Any:
        """Raise an error for the first unsupported field; null is accepted for any field."""
        if isinstance(data, dict):
            for name, value in data.items():
                if name in cls.model_fields or value is None:
                    continue
                values = cls.neutral.get(name, ())
                if values is not None and not _is_one_of(value, values):
                    raise unsupported(name, values, cls.hints.get(name))
        return data


def _is_one_of(value: Any, values: Sequence[Any]) -> bool:
    """Return whether a value is among others; 1 is not true."""
    return any(
        each == value and isinstance(each, bool) == isinstance(value, bool) for each in values
    )


def invalid(field: str, message: str) -> PydanticCustomError:
    """Return the error of a field, for a validator of the whole object."""
    return PydanticCustomError("invalid_field", "{message}", {"field": field, "message": message})


def unsupported(
    name: str, values: Sequence[Any] = (), hint: str | None = None
) -> PydanticCustomError:
    """Return the error of a field whose value is not one of the neutral ones.

    `hint`: what to do instead; by default, to leave the field out.
    """
    shown = name if name.isidentifier() and len(name) <= 100 else ascii(name[:100])
    if hint is None:
        hint = "leave it out"
        if values:
            hint += f", or send {' or '.join(map(json.dumps, values))}"
    return invalid(shown, f"not supported by this server: {hint}")


class StreamOptions(Strict):
    """What a stream contains besides the answer."""

    neutral = STREAM_FIELDS

    include_usage: bool | None = None


def token_ids(tokens: Any) -> list[int]:
    """Return a list of token ids. Checked by hand, as in `_single`."""
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise ValueError("send a list of token ids")
    return tokens


def _by_token(bias: Any) -> dict[int, float] | None:
    """Return biases by token id. Checked by hand, as in `_single`."""
    if bias is None or bias == []:  # llama.cpp's default is a list
        return None
    if not isinstance(bias, dict) or len(bias) > _MAX_BIASES:
        raise ValueError(f"send an object with at most {_MAX_BIASES:,} numbers by token id")
    for token, value in bias.items():
        if not token.isdecimal() or len(token) > _ID_DIGITS or type(value) not in (int, float):
            raise ValueError(f"{token[:100]!a} must be a token id with a number")
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise ValueError(f"the bias of token {token} must be from -{MAX_BIAS} to {MAX_BIAS}")
    return {int(token): value for token, value in bias.items()}


_Biases = Annotated[
    dict[int, float], PlainValidator(_by_token, json_schema_input_type=dict[str, float])
]


def _count(top_k: int | None) -> int | None:
    """Return `top_k` with 0 for -1, which is vLLM's value for all tokens."""
    return None if top_k is None else max(0, top_k)


def _max_tokens(value: int) -> int:
    if value == 0 or value < -1:
        raise ValueError("send 1 or more, or -1 for all that the context has room for")
    return value


def _one(penalty: float) -> float:
    if penalty != 1:
        raise ValueError("send 1, and repetition_penalty, which looks at the whole text")
    return penalty


MaxTokens = Annotated[int, Field(lt=2**63), AfterValidator(_max_tokens)]


class _SamplingBody(Strict):
    """The fields that are options of sampling."""

    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Annotated[int | None, AfterValidator(_count)] = Field(None, ge=-1, lt=2**63)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION, le=MAX_REPETITION)
    presence_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    logit_bias: _Biases | None = None


class _LlamaCppBody(_SamplingBody):
    """Names that llama.cpp has for fields of others, and the window of its penalties."""

    n_predict: MaxTokens | None = None  # max_tokens
    repeat_penalty: Annotated[float, AfterValidator(_one)] | None = None
    repeat_last_n: int | None = None  # tokens that penalties look at; -1: all


def _stops(stop: Any) -> Any:
    """Return None for an empty string, which some clients send for none."""
    return None if stop == "" else stop


class GenerationBody(_LlamaCppBody):
    """The common fields of all bodies that ask for an answer."""

    prompt_field: ClassVar[str]  # name of the field that has the prompt

    model: str | None = None  # the one that is served
    stream: bool | None = None
    stop: Annotated[_Stop | _Stops | None, BeforeValidator(_stops)] = None
    structured_outputs: Annotated[
        Grammar | None, PlainValidator(parse_structured_outputs, json_schema_input_type=JsonObject)
    ] = None

    @model_validator(mode="after")
    def check_one_grammar(self) -> GenerationBody:
        """Raise an error for two grammars."""
        if self.structured_outputs is not None and self.answer_format is not None:
            field, _ = self.answer_format
            raise invalid("structured_outputs", f"send this or {field}, not both")
        return self

    @property
    def grammar(self) -> tuple[str, Grammar] | None:
        """Return the field that has a grammar of the answer, and the grammar; None without one."""
        if self.structured_outputs is not None:
            return "structured_outputs", self.structured_outputs
        return self.answer_format

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def streaming(self) -> StreamOptions | None:
        """Return the options of the stream; None if the answer is not streamed."""
        return StreamOptions() if self.stream else None

    @property
    def returns_ids(self) -> bool:
        """Return whether the answer has the ids of its tokens."""
        return False

    @property
    def repeated(self) -> dict[str, Any]:
        """Return what the response repeats of the request."""
        return {}

    @property
    def answer_format(self) -> tuple[str, Grammar] | None:
        """Return OpenAI's field that has a grammar of the answer, and the grammar, if any."""
        raise NotImplementedError

    @property
    def token_limit(self) -> int | None:
        """Return the limit of new tokens; -1: all that the context has room for."""
        raise NotImplementedError

    @property
    def num_top_logprobs(self) -> int | None:
        """Return the number of top log-probabilities per token; None: no log-probabilities."""
        raise NotImplementedError


class Body(GenerationBody):
    """The common fields of chat and plain completions."""

    hints = dict.fromkeys(OTHER_FORMATS, "use response_format, or structured_outputs")

    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    response_format: Annotated[
        Grammar | None, PlainValidator(parse_response_format, json_schema_input_type=JsonObject)
    ] = None
    return_token_ids: bool | None = None

    @property
    def streaming(self) -> StreamOptions | None:
        return (self.stream_options or StreamOptions()) if self.stream else None

    @property
    def returns_ids(self) -> bool:
        return bool(self.return_token_ids)

    @property
    def answer_format(self) -> tuple[str, Grammar] | None:
        return None if self.response_format is None else ("response_format", self.response_format)

    @property
    def token_limit(self) -> int | None:
        return self.n_predict if self.max_tokens is None else self.max_tokens
