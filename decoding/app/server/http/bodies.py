"""The bodies of requests in OpenAI's format, with validation.

Unsupported fields that would change an answer are refused, never ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from decoding.app.server.http.formats import parse_response_format, parse_structured_outputs
from decoding.app.server.http.neutral_fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    MESSAGE_FIELDS,
    PART_FIELDS,
    STREAM_FIELDS,
    TOKENIZE_FIELDS,
    Neutral,
)
from decoding.app.server.worker import limits
from decoding.grammars.grammar import Grammar
from decoding.speculation.sampling import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_REPETITION,
    MIN_REPETITION,
)
from decoding.text.chat_template import ChatRendering, Variables, is_reserved

# fields of other servers that restrict an answer
_OTHER_FORMATS = {"format", "grammar", "json_schema", "regex"} | {
    f"guided_{name}" for name in ("json", "regex", "choice", "grammar")
}
# names of participants, as in OpenAI's API, without characters of special tokens
_NAME = re.compile(r"[^\s<|\\/>\[\]]{1,64}")
_WORDS = re.compile(r"[\w .,:;/()'+-]{0,100}")  # no character of a special token
_MAX_NUMBER = 1_000_000  # variables have no larger ones: a template may repeat something as often
MAX_TOP_LOGPROBS = 20
_MAX_BIASES, _ID_DIGITS = 10_000, 9
_MAX_VARIABLES = 20

# fields of a tokenization that have no effect on the other kind of prompt
_OF_TEXT = ("add_special_tokens", "add_special")
_OF_MESSAGES = ("continue_final_message", "chat_template_kwargs", "reasoning_effort")
_JsonObject = dict[str, Any] | None
_Stop = Annotated[str, Field(min_length=1, max_length=limits.STOP_CHARACTERS)]
_Stops = Annotated[list[_Stop], Field(max_length=limits.STOPS, fail_fast=True)]


class _Strict(BaseModel):
    """A JSON object whose fields are all supported, or do not change the answer."""

    model_config = ConfigDict(strict=True)

    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def check_supported(cls, data: Any) -> Any:
        """Raise an error for the first unsupported field; null is accepted for any field."""
        if isinstance(data, dict):
            for name, value in data.items():
                if name in cls.model_fields or value is None:
                    continue
                values = cls.neutral.get(name, ())
                if values is not None and value not in values:
                    raise _unsupported(name, values)
        return data


def _invalid(field: str, message: str) -> PydanticCustomError:
    """Return the error of a field, for a validator of the whole object."""
    return PydanticCustomError("invalid_field", "{message}", {"field": field, "message": message})


def _unsupported(name: str, values: Sequence[Any]) -> PydanticCustomError:
    """Return the error of a field whose value is not one of the neutral ones."""
    shown = name if name.isidentifier() and len(name) <= 100 else ascii(name[:100])
    hint = "leave it out"
    if name in _OTHER_FORMATS:
        hint = "use response_format, or structured_outputs"
    elif values:
        hint += f", or send {' or '.join(map(json.dumps, values))}"
    return _invalid(shown, f"not supported by this server: {hint}")


class StreamOptions(_Strict):
    """What a stream contains besides the answer."""

    neutral = STREAM_FIELDS

    include_usage: bool | None = None


def _single(prompt: Any) -> str | list[int]:
    """Return a prompt, also if it is the only one in a list.

    Checked by hand: for a union, pydantic would report an error for each number.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise ValueError(f"{len(prompt)} prompts in one request: send one")
        prompt = prompt[0]
    if not isinstance(prompt, str | list):
        raise ValueError("send a string or a list of token ids")
    return prompt if isinstance(prompt, str) else _token_ids(prompt)


def _token_ids(tokens: Any) -> list[int]:
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


_MaxTokens = Annotated[int, Field(lt=2**63), AfterValidator(_max_tokens)]


class _SamplingBody(_Strict):
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

    n_predict: _MaxTokens | None = None  # max_tokens
    repeat_penalty: Annotated[float, AfterValidator(_one)] | None = None
    repeat_last_n: int | None = None  # tokens that penalties look at; -1: all


def _stops(stop: Any) -> Any:
    """Return None for an empty string, which some clients send for none."""
    return None if stop == "" else stop


class _Body(_LlamaCppBody):
    """The common fields of chat and plain completions."""

    model: str | None = None  # the one that is served
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _MaxTokens | None = None
    stop: Annotated[_Stop | _Stops | None, BeforeValidator(_stops)] = None
    response_format: Annotated[
        Grammar | None, PlainValidator(parse_response_format, json_schema_input_type=_JsonObject)
    ] = None
    structured_outputs: Annotated[
        Grammar | None, PlainValidator(parse_structured_outputs, json_schema_input_type=_JsonObject)
    ] = None
    return_token_ids: bool | None = None

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
    def token_limit(self) -> int | None:
        """Return the limit of new tokens; -1: all that the context has room for."""
        return self.n_predict if self.max_tokens is None else self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """Return the number of top log-probabilities per token; None: no log-probabilities."""
        raise NotImplementedError


class TextPart(_Strict):
    """A part of a message."""

    neutral = PART_FIELDS

    type: Literal["text"]
    text: str


def _name(name: str | None) -> str | None:
    if name is not None and not _NAME.fullmatch(name):
        raise ValueError("a name has 1 to 64 characters, without blanks and any of < > | [ ] / \\")
    return name


class Message(_Strict):
    """A message of a conversation."""

    neutral = MESSAGE_FIELDS

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: Annotated[str | None, AfterValidator(_name)] = None  # the template may have it

    def as_template(self) -> dict[str, str]:
        """Return the message in the format of chat templates."""
        role = "system" if self.role == "developer" else self.role
        name = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": self.text, **name}

    @property
    def text(self) -> str:
        """Return the text of all parts."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


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


class _ChatPrompt(_Strict):
    """The fields of a conversation, from which its prompt is rendered."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[
        Variables | None, PlainValidator(_variables, json_schema_input_type=_JsonObject)
    ] = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    def check_rendering(self, messages: Sequence[Message]) -> None:
        """Raise an error for contradicting fields, or no message to continue."""
        adds, continues = self.add_generation_prompt, bool(self.continue_final_message)
        if adds is not None and adds == continues:
            raise _invalid(
                "add_generation_prompt",
                "send false with continue_final_message: true, and true without it",
            )
        last = messages[-1]
        if continues and not (last.role == "assistant" and last.text.strip()):
            raise _invalid(
                "continue_final_message", "the last message must be the assistant's, and not empty"
            )
        if self.reasoning_effort and "reasoning_effort" in (self.chat_template_kwargs or {}):
            raise _invalid("reasoning_effort", "send it here or in chat_template_kwargs")

    @property
    def rendering(self) -> ChatRendering:
        """Return how the chat template renders the messages."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        return ChatRendering(bool(self.continue_final_message), tuple(variables.items()))


class ChatBody(_Body, _ChatPrompt):
    """The body of a chat completion."""

    neutral = CHAT_FIELDS

    messages: list[Message] = Field(min_length=1, max_length=limits.MESSAGES, fail_fast=True)
    max_completion_tokens: _MaxTokens | None = None
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
            raise _invalid("top_logprobs", "it requires logprobs: true")
        return self

    @property
    def token_limit(self) -> int | None:
        own = self.max_completion_tokens
        return super().token_limit if own is None else own

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(_Body):
    """The body of a completion, whose prompt is a string or token ids."""

    neutral = COMPLETION_FIELDS

    prompt: Annotated[
        str | list[int], PlainValidator(_single, json_schema_input_type=str | list[int] | list[str])
    ]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs


class TokenizeBody(_ChatPrompt):
    """The body of a tokenization: of a text, or of messages as a chat completion reads them."""

    neutral = TOKENIZE_FIELDS

    model: str | None = None
    prompt: str | None = None
    content: str | None = None  # llama.cpp's name
    messages: list[Message] | None = Field(
        None, min_length=1, max_length=limits.MESSAGES, fail_fast=True
    )
    add_special_tokens: bool | None = None
    add_special: bool | None = None  # llama.cpp's name
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def check_one_text(self) -> TokenizeBody:
        """Raise an error unless there is one text."""
        if sum(each is not None for each in (self.prompt, self.content, self.messages)) != 1:
            raise ValueError("send one of prompt, content and messages")
        if self.messages is not None:
            self.check_rendering(self.messages)
        for name in _OF_MESSAGES if self.messages is None else _OF_TEXT:
            if getattr(self, name):
                with_it = "without" if name in _OF_MESSAGES else "with"
                raise _invalid(name, f"not supported {with_it} messages: leave it out")
        return self

    @property
    def has_prefix(self) -> bool:
        """Return whether a text follows the tokenizer's own prefix, as it does in a completion.

        llama.cpp's `content` does not, unless it is asked for.
        """
        for own in (self.add_special_tokens, self.add_special):
            if own is not None:
                return own
        return self.content is None


class DetokenizeBody(_Strict):
    """The body of a detokenization."""

    model: str | None = None
    tokens: Annotated[list[int], PlainValidator(_token_ids, json_schema_input_type=list[int])]


AnyBody = ChatBody | CompletionBody
BODIES: dict[str, type[BaseModel]] = {  # their routes
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
