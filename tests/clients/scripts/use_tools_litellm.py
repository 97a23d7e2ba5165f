"""Call tools through a provider of litellm; print what it returned.

Arguments: provider, URL, model.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import litellm

PROVIDER, URL, MODEL = sys.argv[1:]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
ask = partial(
    litellm.completion,
    f"{PROVIDER}/{MODEL}",
    messages,
    api_base=URL,
    api_key="none",
    max_retries=0,
    tools=tools,
)
forced = {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 200}
whole = ask(**forced).choices[0]
(call,) = whole.message.tool_calls
built = litellm.stream_chunk_builder(list(ask(**forced, stream=True)), messages=messages)
(streamed,) = built.choices[0].message.tool_calls
messages += [
    whole.message.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
]
print(
    json.dumps(
        {
            "finish": [whole.finish_reason, built.choices[0].finish_reason],
            "name": call.function.name,
            "arguments": call.function.arguments,
            "stream name": streamed.function.name,
            "stream": streamed.function.arguments,
            "second": ask(max_tokens=8).choices[0].message.content,
        }
    )
)
