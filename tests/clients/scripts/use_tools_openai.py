"""Call tools through openai; print what it returned. Arguments: URL, model."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any, Literal

import openai
from openai import OpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Berlin"]
    days: Literal[1, 2]


tool: Any = openai.pydantic_function_tool(Weather, name="weather")
messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
client = OpenAI(base_url=URL, api_key="none", max_retries=0)
forced: Any = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
fields: Any = {"model": MODEL, "messages": messages, "tools": [tool], "max_tokens": 200}

create = partial(client.chat.completions.create, **fields)
whole = create(**forced).choices[0]
(call,) = whole.message.tool_calls
chunks = [chunk.choices[0] for chunk in create(**forced, stream=True)]
parts = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
parsed = client.chat.completions.parse(**fields, **forced).choices[0].message.tool_calls[0]
assert isinstance(parsed.function.parsed_arguments, Weather)
one: Any = {"tool_choice": "required", "parallel_tool_calls": False}
with client.chat.completions.stream(**fields, **one) as stream:
    events = [event.type for event in stream]
    last = stream.get_final_completion().choices[0].message.tool_calls[0]
messages += [
    whole.message.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
]
second = client.chat.completions.create(**{**fields, "max_tokens": 8}).choices[0].message
print(
    json.dumps(
        {
            "finish": [whole.finish_reason, chunks[-1].finish_reason],
            "name": call.function.name,
            "arguments": call.function.arguments,
            "stream name": parts[0].function.name,
            "stream": "".join(part.function.arguments or "" for part in parts),
            "parsed": parsed.function.parsed_arguments.model_dump(),
            "done": "tool_calls.function.arguments.done" in events,
            "required": last.function.parsed_arguments.model_dump(),
            "messages": messages,
            "tools": [tool],
            "second": second.content,
        }
    )
)
