"""Tools in the messages of a conversation, changed for chat templates that need it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import chain
from typing import Any

from decoding.text.tools.forms import GRANITE, HERMES

_ID_LENGTH = 9
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
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    has_system: bool = True,
) -> list[dict[str, Any]]:
    """Return messages with tools, their calls and results as text, in Hermes' form.

    Args:
        messages: messages in the format of chat templates.
        tools: tools likewise. They go to the end of the system message.
        has_system: whether there may be one; if not, they precede the first message.
    """
    written = list[dict[str, Any]]()
    is_result = False  # whether the last message has results
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        if is_result and role in ("tool", "user"):  # roles alternate in some templates
            written[-1]["content"] += f"\n{content}"
        else:
            calls = [call["function"] for call in message.get("tool_calls", ())]
            lines = [f"{HERMES.begin}\n{_as_json(call)}\n{HERMES.end}" for call in calls]
            own = {name: each for name, each in message.items() if name in ("role", "name")}
            text = "\n".join([*filter(None, [content]), *lines])
            written.append({**own, "role": "user" if role == "tool" else role, "content": text})
        is_result = role == "tool"
    if tools:
        text = _SYSTEM.format(tools="\n".join(map(_as_json, tools)))
        if not has_system:
            written[0]["content"] = f"{text}\n\n{written[0]['content']}"
        elif written[0]["role"] == "system":
            written[0]["content"] += f"\n\n{text}"
        else:
            written.insert(0, {"role": "system", "content": text})
    return written


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls have ids of nine letters and digits.

    Templates of Mistral models accept no others, and conversations may come from other models.
    """
    changed = list[dict[str, Any]]()
    for number, message in enumerate(messages):
        own = dict(message)
        if "tool_call_id" in own:
            own["tool_call_id"] = _short_id(own["tool_call_id"])
        if "tool_calls" in own:
            own["tool_calls"] = [
                {**call, "id": _short_id(call.get("id", f"{number} {index}"))}
                for index, call in enumerate(own["tool_calls"])
            ]
        changed.append(own)
    return changed


def with_single_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages that have one call each, which its results follow.

    Templates of gpt-oss and Llama 3 render no others: a result is that of the last call.
    """
    changed = list[dict[str, Any]]()
    calls = list[list[dict[str, Any]]]()  # those of the last message, each with its results
    for message in map(dict, messages):
        if calls and message["role"] == "tool":
            own = message.get("tool_call_id")
            called = [each for each in calls if each[0]["tool_calls"][0].get("id") == own]
            min(called or calls, key=len).append(message)
            continue
        changed += chain(*calls)
        calls = [
            [{**message, "tool_calls": [call], **({"content": ""} if index else {})}]
            for index, call in enumerate(message.get("tool_calls", ()))
        ]
        changed += [] if calls else [message]
    return [*changed, *chain(*calls)]


def with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls have objects of strings as arguments.

    Templates that render each argument for itself accept no others than objects, but a call may be
    cut; and of what is no string some write Python's form, which the model would imitate.
    """
    changed = list[dict[str, Any]]()
    for message in messages:
        own = dict(message)
        if "tool_calls" in own:
            own["tool_calls"] = list(map(_with_text, own["tool_calls"]))
        changed.append(own)
    return changed


def with_granite_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls follow their text, in the form that Granite 3 writes them in.

    Its template renders results of calls, but not the calls.
    """
    changed = list[dict[str, Any]]()
    for message in messages:
        own = dict(message)
        if calls := own.pop("tool_calls", None):
            listed = ", ".join(_as_json(call["function"]) for call in calls)
            own["content"] += f"{GRANITE.begin}[{listed}]"
        changed.append(own)
    return changed


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, Mapping):
        arguments = {"arguments": arguments}
    own = {
        name: value if isinstance(value, str) else _as_json(value)
        for name, value in arguments.items()
    }
    return {**call, "function": {**function, "arguments": own}}


def _short_id(own: str) -> str:
    if len(own) == _ID_LENGTH and own.isascii() and own.isalnum():
        return own
    return sha256(own.encode()).hexdigest()[:_ID_LENGTH]


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
