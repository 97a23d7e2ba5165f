"""Use typed agents of pydantic-ai, which call a tool; print what it returned.

Arguments: URL, model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from cities import City
from pydantic_ai import Agent
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

URL, MODEL = sys.argv[1:]
QUESTION = "What is the capital of France?"


provider = OpenAIProvider(base_url=URL, api_key="none")
settings = ModelSettings(max_tokens=200, parallel_tool_calls=False)
model = OpenAIChatModel(MODEL, provider=provider, settings=settings)
agent = Agent(model, output_type=City)


async def stream() -> Any:
    async with agent.run_stream(QUESTION) as run:
        return [city async for city in run.stream_output(debounce_by=None)][-1]


first = agent.run_sync(QUESTION)
streamed = asyncio.run(stream())
second = agent.run_sync("And of Italy?", message_history=first.all_messages())
for city in (first.output, streamed, second.output):
    assert isinstance(city, City)
parts = [part for message in first.all_messages() for part in message.parts]
print(
    json.dumps(
        {
            "typed": first.output.model_dump(),
            "typed stream": streamed.model_dump(),
            "second": second.output.model_dump(),
            "calls": [part.args_as_dict() for part in parts if isinstance(part, ToolCallPart)],
            "results": [part.content for part in parts if isinstance(part, ToolReturnPart)],
            "prompt tokens": [first.usage.input_tokens, second.usage.input_tokens],
        }
    )
)
