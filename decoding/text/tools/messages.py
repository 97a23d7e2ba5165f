"""Tools in the messages of a conversation, for chat templates without tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from decoding.text.tools.forms import HERMES

# the wording that Hermes and Qwen models were trained with (Qwen2.5's chat template)
_SYSTEM = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def in_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return messages with tools, their calls and results as text, in Hermes' form.

    Args:
        messages: messages in the format of chat templates.
        tools: tools likewise; they go to the end of the system message.
    """
    written = list[dict[str, Any]]()
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if written and written[-1]["role"] == "tool":
                written[-1]["content"] += f"\n{content}"
                continue
        calls = [call["function"] for call in message.get("tool_calls", ())]
        lines = [f"{HERMES.begin}\n{_as_json(call)}\n{HERMES.end}" for call in calls]
        own = {name: each for name, each in message.items() if name != "tool_calls"}
        written.append({**own, "content": "\n".join([*filter(None, [content]), *lines])})
    for message in written:
        if message["role"] == "tool":
            message["role"] = "user"
            message.pop("tool_call_id", None)
    if tools:
        text = _SYSTEM.format(tools="\n".join(map(_as_json, tools)))
        if not (written and written[0]["role"] == "system"):
            written.insert(0, {"role": "system", "content": text})
        else:
            written[0]["content"] += f"\n\n{text}"
    return written


def _as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
