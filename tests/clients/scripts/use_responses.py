"""Use OpenAI's Responses API; print what openai returned. Arguments: URL, model."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from typing import Any, Literal

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class House(BaseModel):
    rooms: Literal[1, 2, 3]
    kind: Literal["stone", "wood"]


def error_of(**fields: Any) -> dict[str, Any]:
    """Return the class, code and field of the error of a request with these fields."""
    try:
        create(**fields)
    except openai.APIStatusError as error:
        return {"class": type(error).__name__, "code": error.code, "param": error.param}
    raise AssertionError("there was no error")


async def asynchronous() -> list[str]:
    async with AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as client:
        create = partial(client.responses.create, model=MODEL, input="Who?")
        stream = await create(stream=True)
        deltas = [event.delta async for event in stream if event.type == DELTA]
        return [(await create()).output_text, "".join(deltas)]


DELTA = "response.output_text.delta"
client = OpenAI(base_url=URL, api_key="none", max_retries=0)
create = partial(client.responses.create, model=MODEL, input="Who?")
whole = create()
*events, completed = create(stream=True)
typed: Any = {"model": MODEL, "input": "Who?", "max_output_tokens": 200, "text_format": House}
with client.responses.stream(**typed) as stream:
    deltas = [event.delta for event in stream if event.type == DELTA]
    final = stream.get_final_response()
assert "".join(deltas) == final.output_text
house = client.responses.parse(**typed).output_parsed
assert isinstance(house, House)
turns: Any = [
    {"role": "user", "content": "Who?"},
    *(item.model_dump(exclude_none=True) for item in whole.output),
    {"role": "user", "content": "Why?"},
]
print(
    json.dumps(
        {
            "answer": whole.output_text,
            "status": [whole.status, completed.response.status],
            "usage": [whole.usage.input_tokens, whole.usage.output_tokens],
            "events": [event.sequence_number for event in (*events, completed)],
            "stream": "".join(event.delta for event in events if event.type == DELTA),
            "stream answer": completed.response.output_text,
            "async": asyncio.run(asynchronous()),
            "instructed": create(instructions="Be brief.").output_text,
            "second": create(input=turns).output_text,
            "typed": house.model_dump(),
            "typed stream": final.output_parsed.model_dump(),
            "errors": {
                "field": error_of(extra_body={"speed": 1}),
                "model": error_of(model="gpt-4"),
                "context": error_of(input="a b " * 2_000),
            },
        }
    )
)
