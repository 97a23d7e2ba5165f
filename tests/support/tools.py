"""Tools and calls, in every form that models write them in."""

from __future__ import annotations

from typing import Any

from decoding.text.tools.forms import HERMES, LLAMA_3, MISTRAL, MISTRAL_NAMED, ToolForm

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"type": "string", "maxLength": 12}},
}
SCHEMAS: dict[str, dict[str, Any]] = {"weather": CITY, "now": {"type": "object", "properties": {}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "a <s> b", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
_WEATHER, _NOW = '"weather", "arguments": {"city": "Rome"}', '"now", "arguments": {}'
# answers in each form, with one call of `weather`, and, where there may be more, one of `now`
ANSWERS: list[tuple[ToolForm, str, int]] = [
    (HERMES, f'<tool_call>\n{{"name": {_WEATHER}}}\n</tool_call>', 1),
    (
        HERMES,
        f'<tool_call>\n{{"name": {_WEATHER}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": {_NOW}}}\n</tool_call>',
        2,
    ),
    (LLAMA_3, '{"name": "weather", "parameters": {"city": "Rome"}}', 1),
    (MISTRAL, f'[TOOL_CALLS][{{"name": {_WEATHER}}}]', 1),
    (MISTRAL, f'[TOOL_CALLS] [{{"name": {_WEATHER}}}, {{"name": {_NOW}}}]', 2),
    (MISTRAL_NAMED, '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', 1),
    (MISTRAL_NAMED, '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now[ARGS]{}', 2),
]
CALLS = [("weather", '{"city": "Rome"}'), ("now", "{}")]
