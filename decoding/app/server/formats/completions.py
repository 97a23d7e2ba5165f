"""The body of a completion."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from decoding.app.server.formats.body import MAX_TOP_LOGPROBS, Body, invalid, token_ids
from decoding.app.server.formats.neutral_fields import COMPLETION_FIELDS
from decoding.app.server.worker import limits

Prompt = str | list[int]


def _prompts(prompt: Any) -> list[Prompt]:
    """Return the prompts: one alone, or those in a list.

    Checked by hand: for a union, pydantic would report an error for each number.
    """
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], str | list):
        return [_prompt(prompt)]
    if len(prompt) > limits.PROMPTS:
        raise ValueError(f"{len(prompt)} prompts in one request: send at most {limits.PROMPTS}")
    return [_prompt(each) for each in prompt]


def _prompt(prompt: Any) -> Prompt:
    if not isinstance(prompt, str | list):
        raise ValueError("send a string or a list of token ids, or a list of these")
    return prompt if isinstance(prompt, str) else token_ids(prompt)


def _max_tokens(value: int) -> int:
    if value < -1:
        raise ValueError("send 0 or more, or -1 for all that the context has room for")
    return value


class CompletionBody(Body):
    """The body of a completion, whose prompts are strings or token ids."""

    neutral = COMPLETION_FIELDS
    prompt_field = "prompt"

    prompt: Annotated[
        list[Prompt],
        PlainValidator(
            _prompts, json_schema_input_type=str | list[int] | list[str] | list[list[int]]
        ),
    ]
    max_tokens: Annotated[int, Field(lt=2**63), AfterValidator(_max_tokens)] | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def check_new_tokens(self) -> CompletionBody:
        """Raise an error for no new tokens without an echo: the answer would be empty."""
        if self.max_tokens == 0 and not self.echo:
            message = "send 1 or more, or -1 for all that the context has room for"
            raise invalid("max_tokens", f"{message}; 0 requires echo: true")
        return self

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs
