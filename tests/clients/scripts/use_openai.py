"""Use any openai from 1.0 on; print what it returned.

Arguments: base URL, model, and "typed" if this version parses typed answers.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

URL, MODEL, *MORE = sys.argv[1:]
WHO = [{"role": "user", "content": "Who?"}]
USAGE = {"stream_options": {"include_usage": True}}  # no argument of its own in 1.0


class House(BaseModel):
    model_config = ConfigDict(extra="forbid")
    rooms: Literal[1, 2, 3]
    kind: Literal["stone", "wood"]


def error_of(call: Callable[..., Any], **fields: Any) -> dict[str, Any]:
    """Return the class, code and field of the error that a call raises."""
    try:
        call(**fields)
    except openai.APIStatusError as error:
        found = {"code": error.code, "param": error.param}
        if openai.__version__ == "1.0.0":  # It looks for them one level too high.
            found = {name: error.response.json()["error"][name] for name in found}
        return {"class": type(error).__name__, **found}
    raise AssertionError("there was no error")


def joined(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def used(usage: Any) -> list[int]:
    return [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens]


def synchronous(client: OpenAI) -> dict[str, Any]:
    ask = partial(client.chat.completions.create, model=MODEL, messages=WHO)
    complete = partial(client.completions.create, model=MODEL, prompt="It was", max_tokens=8)
    answer, text = ask(), complete(logprobs=1)
    *chunks, last = ask(stream=True, extra_body=USAGE)
    content = answer.choices[0].message.content
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=WHO, max_tokens=10**6, stop=[content[6:9]]
    )
    return {
        "models": [card.id for card in client.models.list()],
        "model": client.models.retrieve(MODEL).id,
        "answer": content,
        "finish": answer.choices[0].finish_reason,
        "usage": used(answer.usage),
        "stream": joined(chunks),
        "stream usage": used(openai.types.CompletionUsage(**dict(last.usage))),
        "raw": raw.parse().choices[0].message.content,
        "max tokens": raw.headers["X-Max-Tokens"],
        "text": text.choices[0].text,
        "tokens": text.choices[0].logprobs.tokens,
        "text stream": "".join(chunk.choices[0].text for chunk in complete(stream=True)),
        "errors": {
            "field": error_of(ask, extra_body={"speed": 1}),
            "model": error_of(ask, model="gpt-4"),
            "context": error_of(complete, prompt=[5] * 2_000),
            "path": error_of(client.embeddings.create, model=MODEL, input="Who?"),
        },
    }


async def asynchronous() -> dict[str, Any]:
    async with AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as client:
        ask = partial(client.chat.completions.create, model=MODEL, messages=WHO)
        answers = await asyncio.gather(*(ask() for _ in range(3)))
        chunks = [chunk async for chunk in await ask(stream=True)]
        return {
            "async": [answer.choices[0].message.content for answer in answers],
            "async stream": joined(chunks),
        }


def typed(client: OpenAI) -> dict[str, Any]:
    """Return an answer of each helper that parses it."""
    fields: dict[str, Any] = {"model": MODEL, "messages": WHO, "max_tokens": 200}
    answer = client.chat.completions.parse(**fields, response_format=House)
    house = answer.choices[0].message.parsed
    assert isinstance(house, House)
    with client.chat.completions.stream(**fields, response_format=House) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        last = stream.get_final_completion().choices[0].message
    assert isinstance(last.parsed, House)
    assert "".join(deltas) == last.content
    return {"typed": house.model_dump(), "typed stream": last.parsed.model_dump()}


client = OpenAI(base_url=URL, api_key="none", max_retries=0)
report = {**synchronous(client), **asyncio.run(asynchronous())}
if MORE == ["typed"]:
    report |= typed(client)
print(json.dumps(report))
