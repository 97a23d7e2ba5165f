"""Call tools through OpenAI's Responses API; print what openai returned. Arguments: URL, model."""

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


typed_tool: Any = openai.pydantic_function_tool(Weather, name="weather")
tool: Any = {"type": "function", **typed_tool["function"]}
turns: list[Any] = [{"role": "user", "content": "How is the weather?"}]
client = OpenAI(base_url=URL, api_key="none", max_retries=0)
forced: Any = {"tool_choice": {"type": "function", "name": "weather"}}
fields: Any = {"model": MODEL, "input": turns, "tools": [tool], "max_output_tokens": 200}

create = partial(client.responses.create, **fields)
(call,) = create(**forced).output
*events, completed = create(**forced, stream=True)
deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
(streamed,) = completed.response.output
typed = {**fields, **forced, "tools": [typed_tool]}
parsed = client.responses.parse(**typed).output[0].parsed_arguments
assert isinstance(parsed, Weather)
with client.responses.stream(**fields, tool_choice="required", parallel_tool_calls=False) as stream:
    kinds = [event.type for event in stream]
    (last,) = stream.get_final_response().output
result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
turns += [call.model_dump(exclude_none=True), result]
second = client.responses.create(**{**fields, "max_output_tokens": 8})
print(
    json.dumps(
        {
            "finish": [call.status, completed.response.status],
            "name": call.name,
            "arguments": call.arguments,
            "stream name": streamed.name,
            "stream": "".join(deltas),
            "parsed": parsed.model_dump(),
            "done": "response.function_call_arguments.done" in kinds,
            "required": json.loads(last.arguments),
            "turns": turns,
            "tools": [tool],
            "second": second.output_text,
        }
    )
)
