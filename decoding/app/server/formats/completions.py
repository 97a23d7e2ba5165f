"""The body of a completion."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator

from decoding.app.server.formats.body import MAX_TOP_LOGPROBS, Body, token_ids
from decoding.app.server.formats.neutral_fields import COMPLETION_FIELDS


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
    return prompt if isinstance(prompt, str) else token_ids(prompt)


class CompletionBody(Body):
    """The body of a completion, whose prompt is a string or token ids."""

    neutral = COMPLETION_FIELDS
    prompt_field = "prompt"

    prompt: Annotated[
        str | list[int], PlainValidator(_single, json_schema_input_type=str | list[int] | list[str])
    ]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs
