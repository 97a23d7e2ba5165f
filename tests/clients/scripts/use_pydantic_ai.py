"""Use pydantic-ai without tools; print what it returned. Arguments: URL, model."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from cities import City
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1:]
QUESTION = "What is the capital of France?"


def model(name: str = MODEL) -> OpenAIChatModel:
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=URL, api_key="none"))


def error_of(name: str = MODEL, question: str = QUESTION, **settings: Any) -> dict[str, Any]:
    """Return the class, status and body of the error that a run raises."""
    try:
        Agent(model(name), model_settings=settings or None).run_sync(question)
    except ModelHTTPError as error:
        return {
            "class": type(error).__name__,
            "status": error.status_code,
            "code": error.body["code"],
            "param": error.body["param"],
        }
    raise AssertionError("there was no error")


async def streams() -> dict[str, Any]:
    async with Agent(model()).run_stream(QUESTION) as run:
        deltas = [delta async for delta in run.stream_text(delta=True, debounce_by=None)]
        usage = run.usage
    async with Agent(model(), output_type=NativeOutput(City)).run_stream(QUESTION) as run:
        cities = [city async for city in run.stream_output(debounce_by=None)]
    return {
        "stream": "".join(deltas),
        "stream usage": [usage.input_tokens, usage.output_tokens],
        "typed stream": cities[-1].model_dump(),
    }


agent = Agent(model())
first = agent.run_sync(QUESTION)
second = agent.run_sync("And of Italy?", message_history=first.all_messages())
city = Agent(model(), output_type=NativeOutput(City)).run_sync(QUESTION).output
assert isinstance(city, City)
print(
    json.dumps(
        {
            "answer": first.output,
            "usage": [first.usage.input_tokens, first.usage.output_tokens],
            "second": second.output,
            "typed": city.model_dump(),
            **asyncio.run(streams()),
            "errors": {
                "field": error_of(extra_body={"speed": 1}),
                "model": error_of("gpt-4"),
                "context": error_of(question="a b " * 2_000),
            },
        }
    )
)
