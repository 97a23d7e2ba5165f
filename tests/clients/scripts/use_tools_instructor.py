"""Use instructor's default mode, which calls a tool; print what it returned.

Arguments: URL, model.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import instructor
from cities import City, Ruled
from instructor.core import InstructorRetryException
from openai import OpenAI

URL, MODEL = sys.argv[1:]


request: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 200,
}
client = instructor.from_openai(OpenAI(base_url=URL, api_key="none", max_retries=0))
assert client.mode == instructor.Mode.TOOLS
city, completion = client.chat.completions.create_with_completion(response_model=City, **request)
assert isinstance(city, City)
cities = list(client.chat.completions.create_partial(response_model=City, **request))
errors = []
try:
    client.chat.completions.create(response_model=Ruled, max_retries=1, **request)
except InstructorRetryException as error:
    errors = [str(attempt.exception) for attempt in error.failed_attempts]
print(
    json.dumps(
        {
            "typed": city.model_dump(),
            "arguments": completion.choices[0].message.tool_calls[0].function.arguments,
            "partial": [each.model_dump() for each in cities],
            "invalid": errors,
        }
    )
)
