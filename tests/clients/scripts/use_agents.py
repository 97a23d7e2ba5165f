"""Use agents of OpenAI's SDK that call a tool; print what they returned.

Arguments: URL, model, the SDK's class of models.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import agents
from agents import Agent, ModelSettings, Runner, function_tool
from cities import City
from openai import AsyncOpenAI

URL, MODEL, KIND = sys.argv[1:]
QUESTION = "How is the weather?"
calls: list[Any] = []


@function_tool
def weather(city: Literal["Paris", "Rome", "Berlin"], days: Literal[1, 2]) -> str:
    """Return the weather of a city."""
    calls.append([city, days])
    return f"sunny in {city}"


async def run() -> dict[str, Any]:
    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    model = getattr(agents, KIND)(MODEL, client)
    short = ModelSettings(max_tokens=200)
    forced = ModelSettings(max_tokens=200, tool_choice="required", parallel_tool_calls=False)
    agent = Agent(
        "a", instructions="Be brief.", model=model, tools=[weather], model_settings=forced
    )
    whole = await Runner.run(agent, QUESTION)
    stream = Runner.run_streamed(agent, QUESTION)
    async for _ in stream.stream_events():
        pass
    typed = Agent("b", model=model, output_type=City, model_settings=short)
    city = (await Runner.run(typed, QUESTION)).final_output
    assert isinstance(city, City)
    return {
        "answer": whole.final_output,
        "items": [type(item).__name__ for item in whole.new_items],
        "stream": stream.final_output,
        "typed": city.model_dump(),
    }


found = asyncio.run(run())
print(json.dumps({**found, "calls": calls}))
