"""Use instructor's mode for JSON schemas; print what it returned. Arguments: URL, model."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import instructor
from cities import City, Ruled
from instructor.core import InstructorRetryException
from openai import AsyncOpenAI, OpenAI

URL, MODEL = sys.argv[1:]
where = {"base_url": URL, "api_key": "none", "max_retries": 0}


request: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 100,
}
mode = instructor.Mode.JSON_SCHEMA
client = instructor.from_openai(OpenAI(**where), mode=mode)
city, completion = client.chat.completions.create_with_completion(response_model=City, **request)
assert isinstance(city, City)
partial_cities = list(client.chat.completions.create_partial(response_model=City, **request))


async def asynchronous() -> City:
    asynchronous_client = instructor.from_openai(AsyncOpenAI(**where), mode=mode)
    return await asynchronous_client.chat.completions.create(response_model=City, **request)


def failure(**fields: Any) -> InstructorRetryException:
    """Return the error of a request that cannot be answered."""
    try:
        client.chat.completions.create(**{**request, "response_model": City, **fields})
    except InstructorRetryException as error:
        return error
    raise AssertionError("there was no error")


print(
    json.dumps(
        {
            "typed": city.model_dump(),
            "raw": completion.choices[0].message.content,
            "partial": [each.model_dump() for each in partial_cities],
            "async": asyncio.run(asynchronous()).model_dump(),
            "invalid": [
                str(attempt.exception)
                for attempt in failure(response_model=Ruled, max_retries=1).failed_attempts
            ],
            "model": str(failure(model="gpt-4", max_retries=0)),
        }
    )
)
