"""Use a provider of litellm; print what it returned. Arguments: provider, URL, model."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from typing import Any, Literal

import litellm
import openai
from pydantic import BaseModel, ConfigDict

PROVIDER, URL, MODEL = sys.argv[1:]
WHO = [{"role": "user", "content": "Who?"}]
litellm.suppress_debug_info = True
where = {"api_base": URL, "api_key": "none", "max_retries": 0}
ask = partial(litellm.completion, f"{PROVIDER}/{MODEL}", WHO, **where)


class House(BaseModel):
    model_config = ConfigDict(extra="forbid")
    rooms: Literal[1, 2, 3]
    kind: Literal["stone", "wood"]


def used(usage: Any) -> list[int]:
    return [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens]


def error_of(**fields: Any) -> dict[str, Any]:
    """Return the class and message of the error of a request with these fields."""
    try:
        litellm.completion(**{"model": f"{PROVIDER}/{MODEL}", "messages": WHO, **where, **fields})
    except openai.APIStatusError as error:
        kind = type(error)
        return {"class": f"{kind.__module__}.{kind.__name__}", "message": error.message}
    raise AssertionError("there was no error")


async def answer_and_stream() -> list[str]:
    ask = partial(litellm.acompletion, f"{PROVIDER}/{MODEL}", WHO, **where)
    answer, stream = await asyncio.gather(ask(), ask(stream=True))
    deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
    return [answer.choices[0].message.content, "".join(deltas)]


answer = ask()
chunks = list(ask(stream=True, stream_options={"include_usage": True}))
built = litellm.stream_chunk_builder(chunks, messages=WHO)
house = ask(response_format=House, max_tokens=200).choices[0].message.content
print(
    json.dumps(
        {
            "answer": answer.choices[0].message.content,
            "finish": answer.choices[0].finish_reason,
            "usage": used(answer.usage),
            "stream": built.choices[0].message.content,
            "stream usage": used(built.usage),
            "async": asyncio.run(answer_and_stream()),
            "typed": House.model_validate_json(house).model_dump(),
            "errors": {
                "field": error_of(speed=1),
                "model": error_of(model=f"{PROVIDER}/gpt-4"),
                "context": error_of(messages=[{"role": "user", "content": "a b " * 2_000}]),
            },
        }
    )
)
