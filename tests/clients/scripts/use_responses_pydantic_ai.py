"""Use pydantic-ai's model for the Responses API; print what it returned. Arguments: URL, model."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Literal

from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1:]


class House(BaseModel):
    model_config = ConfigDict(extra="forbid")
    rooms: Literal[1, 2, 3]
    kind: Literal["stone", "wood"]


async def stream() -> str:
    async with Agent(model).run_stream("Who?") as run:
        deltas = [delta async for delta in run.stream_text(delta=True, debounce_by=None)]
        return "".join(deltas)


model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
first = Agent(model).run_sync("Who?")
second = Agent(model).run_sync("Why?", message_history=first.all_messages())
typed = Agent(model, output_type=NativeOutput(House), model_settings={"max_tokens": 200})
house = typed.run_sync("Who?").output
called = Agent(model, output_type=House, model_settings={"max_tokens": 200}).run_sync("Who?")
again = Agent(model, output_type=House, model_settings={"max_tokens": 200}).run_sync(
    "Why?", message_history=called.all_messages()
)
for own in (house, called.output, again.output):
    assert isinstance(own, House)
print(
    json.dumps(
        {
            "answer": first.output,
            "usage": [first.usage.input_tokens, first.usage.output_tokens],
            "second": second.output,
            "stream": asyncio.run(stream()),
            "typed": house.model_dump(),
            "called": [called.output.model_dump(), again.output.model_dump()],
            "prompt tokens": [called.usage.input_tokens, again.usage.input_tokens],
        }
    )
)
