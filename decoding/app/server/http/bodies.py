"""The bodies of requests, as OpenAI's interface has them, and what is refused of them.

What would change an answer and cannot be done is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from decoding.app.server.worker import limits

_Accepted = Mapping[str, tuple[Any, ...] | None]
# fields that change no answer, with the values that are taken; None: with any value
_ACCEPTED: _Accepted = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": None,
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": None,
    "presence_penalty": (0,),
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "response_format": ({"type": "text"},),
    "safety_identifier": None,
    "service_tier": None,
    "store": None,
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "user": None,
}
MAX_TOP = 20  # likeliest tokens whose probabilities are told


_Stop = Annotated[str, Field(min_length=1, max_length=limits.STOP_CHARACTERS)]
_Stops = Annotated[list[_Stop], Field(max_length=limits.STOPS, fail_fast=True)]


class _Strict(BaseModel):
    """An object of which every field is known, or says nothing that would change an answer."""

    model_config = ConfigDict(strict=True)

    accepted: ClassVar[_Accepted] = {}

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported(cls, data: Any) -> Any:
        """Raise ValueError for the first field that cannot be followed; null says nothing."""
        if isinstance(data, dict):
            for name, value in data.items():
                values = cls.accepted.get(name, ())
                if not (name in cls.model_fields or values is None or value in (None, *values)):
                    shown = name if name.isidentifier() and len(name) <= 100 else ascii(name[:100])
                    raise ValueError(f"{shown} is not supported by this server: leave it out")
        return data


class StreamOptions(_Strict):
    """What a stream has beside the answer."""

    accepted = {"include_obfuscation": (False,)}

    include_usage: bool | None = None


def _single(prompt: Any) -> str | list[int]:
    """Return a prompt, which may be the only one in a list.

    It is looked at by hand: of a union, pydantic would tell of each number what it is not.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise ValueError(f"{len(prompt)} prompts in one request: send one")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or any(type(token) is not int for token in prompt):
        raise ValueError("send a text, or the ids of its tokens")
    return prompt


class _Body(_Strict):
    """What chat and plain completions have in common."""

    accepted = _ACCEPTED

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**63)
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**63)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: _Stop | _Stops | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def most(self) -> tuple[str, int | None]:
        """Return the most tokens to write, behind the field that says so."""
        return "max_tokens", self.max_tokens

    @property
    def top(self) -> int | None:
        """Return of how many likeliest tokens probabilities are told; None where of no token."""
        raise NotImplementedError


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """What somebody said."""

    accepted = {"name": None, "annotations": ([],), "tool_calls": ([],)}

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    def as_template(self) -> dict[str, str]:
        """Return it as chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "".join(part.text for part in self.content)}


class ChatBody(_Body):
    """A conversation that is to be answered."""

    messages: list[Message] = Field(min_length=1, max_length=limits.MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**63)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)

    @model_validator(mode="after")
    def refuse_contradictions(self) -> ChatBody:
        """Raise ValueError for fields that do not go together."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def most(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().most
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(_Body):
    """A text that is to be continued: itself, or its tokens."""

    prompt: Annotated[str | list[int], PlainValidator(_single)]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)

    @property
    def top(self) -> int | None:
        return self.logprobs


AnyBody = ChatBody | CompletionBody
