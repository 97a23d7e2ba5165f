"""Tools and calls, in every form that models write them in."""

from __future__ import annotations

from typing import Any

from decoding.text.tools.forms import (
    APERTUS,
    APRIEL,
    GLM,
    GLM_COMPACT,
    GRANITE,
    HERMES,
    LLAMA_3,
    MISTRAL,
    MISTRAL_NAMED,
    NEMOTRON,
    QWEN_CODER,
    SEED_OSS,
    ToolForm,
)

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"type": "string", "maxLength": 12}},
}
FORECAST = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {"weather": CITY, "now": {"type": "object", "properties": {}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "a <s> b", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
_WEATHER, _NOW = '"weather", "arguments": {"city": "Rome"}', '"now", "arguments": {}'
_QWEN = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
    "</tool_call>"
)
_QWEN_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
_SEED, _SEED_NOW = (
    own.replace("tool_call>", "seed:tool_call>").replace("\nRome\n", "Rome")
    for own in (_QWEN, _QWEN_NOW)
)
_GLM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
_COMPACT = _GLM.replace("\n", "")
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
    (QWEN_CODER, _QWEN, 1),
    (QWEN_CODER, f"{_QWEN}\n{_QWEN_NOW}", 2),
    (GLM, _GLM, 1),
    (GLM, f"{_GLM}\n<tool_call>now\n</tool_call>", 2),
    (GLM_COMPACT, _COMPACT, 1),
    (GLM_COMPACT, f"{_COMPACT}<tool_call>now</tool_call>", 2),
    (SEED_OSS, _SEED, 1),
    (SEED_OSS, f"{_SEED}\n{_SEED_NOW}", 2),
    (NEMOTRON, f'<TOOLCALL>[{{"name": {_WEATHER}}}]</TOOLCALL>', 1),
    (NEMOTRON, f'<TOOLCALL>[{{"name": {_WEATHER}}}, {{"name": {_NOW}}}]</TOOLCALL>', 2),
    (GRANITE, f'<|tool_call|>[{{"name": {_WEATHER}}}]', 1),
    (GRANITE, f'<|tool_call|>[{{"name": {_WEATHER}}}, {{"name": {_NOW}}}]', 2),
    (APRIEL, f'<tool_calls>[{{"name": {_WEATHER}}}]</tool_calls>', 1),
    (APRIEL, f'<tool_calls>[{{"name": {_WEATHER}}}, {{"name": {_NOW}}}]</tool_calls>', 2),
    (APERTUS, '<|tools_prefix|>[{"weather": {"city": "Rome"}}]<|tools_suffix|>', 1),
    (APERTUS, '<|tools_prefix|>[{"weather": {"city": "Rome"}}, {"now": {}}]<|tools_suffix|>', 2),
]
CALLS = [("weather", '{"city": "Rome"}'), ("now", "{}")]
