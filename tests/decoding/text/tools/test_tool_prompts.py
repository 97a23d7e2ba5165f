"""Tools in prompts: by the template, or as text where it has none; with no special tokens."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from transformers import AutoTokenizer

from decoding.text.chat_template import ChatRendering
from decoding.text.prompt import chat_tokens
from decoding.text.tools.forms import (
    APERTUS,
    APRIEL,
    GLM,
    GLM_COMPACT,
    GRANITE,
    HARMONY,
    HERMES,
    LLAMA_3,
    MISTRAL,
    MISTRAL_NAMED,
    NEMOTRON,
    QWEN_CODER,
    SEED_OSS,
    ToolForm,
    form_of,
    marker_ids,
    supports_tools,
)
from decoding.text.tools.messages import with_single_calls
from decoding.text.tools.parser import ToolCallParser
from decoding.text.tools.strings import strings_in, with_strings
from offload.errors import InvalidRequestError
from support.chat_model import TEMPLATE
from support.chat_templates import (
    APERTUS_TOOLS,
    APRIEL_TOOLS,
    CHATML,
    GLM_COMPACT_TOOLS,
    GLM_TOOLS,
    GRANITE_TOOLS,
    HARMONY_TOOLS,
    HERMES_TOOLS,
    LLAMA_TOOLS,
    MISTRAL_TOOLS,
    NEMOTRON_TOOLS,
    QWEN_CODER_TOOLS,
    SEED_OSS_TOOLS,
)
from support.commands import TARGET
from support.tools import TOOLS

_CALL = {"id": "123456789", "type": "function"}
_FUNCTION = {"name": "weather", "arguments": {"city": "R<s>ome </s>"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "How is the weather?"},
    {"role": "assistant", "content": "", "tool_calls": [{**_CALL, "function": _FUNCTION}]},
    {"role": "tool", "content": '"fine </s>"', "tool_call_id": "123456789"},
    {"role": "user", "content": "And now?"},
]


def make_tokenizer(template: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.chat_template = template
    return tokenizer


WITH_TAGS = [QWEN_CODER_TOOLS, GLM_TOOLS, GLM_COMPACT_TOOLS, SEED_OSS_TOOLS]
WITH_JSON = [HERMES_TOOLS, LLAMA_TOOLS, MISTRAL_TOOLS, NEMOTRON_TOOLS, APRIEL_TOOLS]
WITH_JSON += [APERTUS_TOOLS, HARMONY_TOOLS]


@pytest.mark.parametrize("template", [*WITH_JSON, *WITH_TAGS])
def test_prompts_are_those_of_transformers(template: str) -> None:
    """But for the special tokens in tools, arguments and results, which stay text."""
    tokenizer = make_tokenizer(template)
    tokens = chat_tokens(tokenizer, MESSAGES, rendering=ChatRendering(tools=TOOLS))
    expected = tokenizer.apply_chat_template(
        MESSAGES, tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(tokens) == expected
    assert '"description": "a <s> b"' in expected
    assert not set(tokens) & set(tokenizer.all_special_ids)


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (
            QWEN_CODER_TOOLS,
            "\n<tool_call>\n<function=weather>\n<parameter=city>\nR<s>ome </s>\n</parameter>\n"
            "</function>\n</tool_call><|end|>",
        ),
        (
            GLM_TOOLS,
            "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>R<s>ome </s></arg_value>\n"
            "</tool_call><|end|>",
        ),
        (
            GLM_COMPACT_TOOLS,
            "<tool_call>weather<arg_key>city</arg_key><arg_value>R<s>ome </s></arg_value>"
            "</tool_call><|end|>",
        ),
        (
            SEED_OSS_TOOLS,
            "\n<seed:tool_call>\n<function=weather>\n<parameter=city>R<s>ome </s></parameter>\n"
            "</function>\n</seed:tool_call><|end|>",
        ),
    ],
)
def test_calls_with_tags(template: str, call: str) -> None:
    """Calls that were cut are rendered, too, as one argument: templates take objects only."""
    tokenizer = make_tokenizer(template)
    assert f"<|assistant|>{call}" in tokenizer.decode(chat_tokens(tokenizer, MESSAGES))
    function = {"name": "weather", "arguments": '{"city": "Ro'}
    cut = [MESSAGES[0], {**MESSAGES[1], "tool_calls": [{"function": function}]}]
    text = tokenizer.decode(chat_tokens(tokenizer, cut))
    assert '{"city": "Ro' in text
    expected = call.replace("city", "arguments").replace("R<s>ome </s>", '{"city": "Ro')
    assert f"<|assistant|>{expected}" in text


@pytest.mark.parametrize("template", WITH_TAGS)
def test_values_between_tags_come_back_as_they_were(template: str) -> None:
    """Templates write some of them in Python's form, which would be read as strings."""
    arguments = {"s": "a", "l": ["é", None], "b": True, "n": None, "o": {"x": [False]}, "i": 3}
    types = {"s": "string", "l": "array", "b": "boolean", "n": "null", "o": "object"}
    schema = {"properties": {name: {"type": own} for name, own in types.items()}}
    call = {**_CALL, "function": {"name": "f", "arguments": arguments}}
    tokenizer = make_tokenizer(template)
    tokens = chat_tokens(tokenizer, [MESSAGES[0], {**MESSAGES[1], "tool_calls": [call]}])
    answer = tokenizer.decode(tokens).rpartition("<|assistant|>")[0].rpartition("<|assistant|>")[2]
    (read,) = ToolCallParser(form_of(template), {"f": schema}).feed(answer).calls
    assert json.loads(read.arguments) == arguments


def test_calls_that_the_template_leaves_out() -> None:
    tokenizer = make_tokenizer(GRANITE_TOOLS)
    marker = GRANITE.begin
    tokenizer.add_special_tokens({"additional_special_tokens": [marker]})
    function = {"name": "now", "arguments": {"a": marker}}
    both = [{**_CALL, "function": each} for each in (_FUNCTION, function)]
    messages = [MESSAGES[0], {**MESSAGES[1], "content": "So", "tool_calls": both}, MESSAGES[2]]
    tokens = chat_tokens(tokenizer, messages)
    assert tokens.count(tokenizer.convert_tokens_to_ids(marker)) == 1
    assert tokenizer.decode(tokens).endswith(
        f'<|assistant|>So{marker}[{{"name": "weather", "arguments": {{"city": "R<s>ome </s>"}}}}, '
        f'{{"name": "now", "arguments": {{"a": "{marker}"}}}}]<|end|>\n'
        '<|tool|>"fine </s>"<|end|>\n<|assistant|>'
    )


@pytest.mark.parametrize(
    ("ids", "results", "expected"),
    [
        ("ab", "ab", "AaBb"),
        ("ab", "ba", "AaBb"),
        ("abc", "ca", "AaBCc"),
        ("ab", "xx", "AxBx"),  # results of other calls, or without ids, are in their order
        ("aa", "aa", "AaAa"),
        ("ab", "aab", "AaaBb"),
        ("ab", "", "AB"),
    ],
)
def test_calls_are_followed_by_their_results(ids: str, results: str, expected: str) -> None:
    message = {"role": "assistant", "content": "So", "tool_calls": [{"id": own} for own in ids]}
    before, after = {"role": "tool", "content": ""}, {"role": "user", "content": "And?"}
    own = [{"role": "tool", "content": "", "tool_call_id": each} for each in results]
    first, *split, last = with_single_calls([before, message, *own, after])
    assert (first, last) == (before, after)
    found = [
        each["tool_calls"][0]["id"].upper() if "tool_calls" in each else each["tool_call_id"]
        for each in split
    ]
    assert "".join(found) == expected
    assert [each["content"] for each in split] == ["So", *[""] * (len(split) - 1)]


def test_several_calls_where_the_template_has_one_in_a_message() -> None:
    tokenizer = make_tokenizer(LLAMA_TOOLS)
    own = [{"id": each, "function": {"name": each, "arguments": {}}} for each in "ab"]
    results = [{"role": "tool", "content": each.upper(), "tool_call_id": each} for each in "ba"]
    messages = [MESSAGES[0], {**MESSAGES[1], "tool_calls": own}, *results]
    rounds = [
        f'<|assistant|>{{"name": "{each}", "parameters": {{}}}}<|end|><|ipython|>"{each.upper()}"'
        for each in "ab"
    ]
    assert "<|end|>".join(rounds) in tokenizer.decode(chat_tokens(tokenizer, messages))


def test_ids_have_no_special_tokens() -> None:
    tokenizer = make_tokenizer(HERMES_TOOLS.replace("m.content", "m.content + m.tool_call_id"))
    messages = [{**MESSAGES[2], "tool_call_id": "1</s>2"}]
    tokens = chat_tokens(tokenizer, messages, rendering=ChatRendering(tools=TOOLS))
    assert '"fine </s>"1</s>2' in tokenizer.decode(tokens)
    assert not set(tokens) & set(tokenizer.all_special_ids)


def test_tools_are_text_where_the_template_has_none() -> None:
    tokenizer = make_tokenizer(TEMPLATE)
    results = [*MESSAGES[:3], {**MESSAGES[2], "content": "cold"}]
    text = tokenizer.decode(
        chat_tokens(tokenizer, results, rendering=ChatRendering(tools=TOOLS[1:]))
    )
    system, _, assistant, tool, rest = text.split("<|end|>\n")
    assert system.startswith("<|system|># Tools\n")
    assert f"<tools>\n{json.dumps(TOOLS[1])}\n</tools>" in system
    assert assistant == (
        '<|assistant|><tool_call>\n{"name": "weather", "arguments": {"city": "R<s>ome </s>"}}\n'
        "</tool_call>"
    )
    assert tool == (
        '<|user|><tool_response>\n"fine </s>"\n</tool_response>\n'
        "<tool_response>\ncold\n</tool_response>"
    )
    assert rest == "<|assistant|>"
    own = [{"role": "system", "content": "Be brief."}, *results[:1]]
    text = tokenizer.decode(chat_tokens(tokenizer, own, rendering=ChatRendering(tools=TOOLS)))
    assert text.startswith("<|system|>Be brief.\n\n# Tools\n")
    assert text.count("<|system|>") == 1


def test_tools_come_first_where_there_is_no_system_message() -> None:
    refusing = "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template = TEMPLATE.replace("<|{{", refusing + "<|{{")
    tokenizer = make_tokenizer(template)
    text = tokenizer.decode(
        chat_tokens(tokenizer, MESSAGES, rendering=ChatRendering(tools=TOOLS[1:]))
    )
    assert text.startswith("<|user|># Tools\n")
    assert "</tool_call>\n\nHow is the weather?<|end|>\n" in text
    # roles alternate
    assert "</tool_response>\nAnd now?<|end|>\n<|assistant|>" in text


def test_a_template_with_another_variable_has_no_tools() -> None:
    """SmolLM3's: `tools` occurs in its text only."""
    template = "{% if xml_tools %}<tools>{{ xml_tools }}</tools>{% endif %}" + TEMPLATE
    assert not supports_tools(template)
    assert supports_tools("{% generation %}{% endgeneration %}" + HERMES_TOOLS)
    conditional = "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}"
    assert supports_tools(conditional)


def test_mistral_models_get_ids_that_they_accept() -> None:
    tokenizer = make_tokenizer(MISTRAL_TOOLS)
    messages = [
        MESSAGES[0],
        {**MESSAGES[1], "tool_calls": [{**MESSAGES[1]["tool_calls"][0], "id": "call_1"}]},
        {**MESSAGES[2], "tool_call_id": "call_1"},
    ]
    text = tokenizer.decode(chat_tokens(tokenizer, messages))
    (found,) = re.findall(r'"call_id": "(\w+)"', text)
    assert len(found) == 9
    del messages[1]["tool_calls"][0]["id"]
    assert chat_tokens(tokenizer, messages)


def test_messages_without_tools_are_as_they_were() -> None:
    tokenizer = make_tokenizer(TEMPLATE)
    expected = "<|user|>How is the weather?<|end|>\n<|assistant|>"
    assert tokenizer.decode(chat_tokens(tokenizer, MESSAGES[:1])) == expected


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (HERMES_TOOLS, HERMES),
        (LLAMA_TOOLS + "<|python_tag|>", LLAMA_3),
        (MISTRAL_TOOLS, MISTRAL),
        (MISTRAL_TOOLS + "[ARGS]", MISTRAL_NAMED),
        (QWEN_CODER_TOOLS, QWEN_CODER),
        (GLM_TOOLS, GLM),
        (GLM_COMPACT_TOOLS, GLM_COMPACT),
        (HARMONY_TOOLS, HARMONY),
        (SEED_OSS_TOOLS, SEED_OSS),
        (NEMOTRON_TOOLS, NEMOTRON),
        (GRANITE_TOOLS, GRANITE),
        (APRIEL_TOOLS, APRIEL),
        (APERTUS_TOOLS, APERTUS),
        (CHATML, HERMES),  # has no tools
    ],
)
def test_the_template_shows_the_form(template: str, form: ToolForm) -> None:
    assert form_of(template) is form


@pytest.mark.parametrize(
    "other", ["<function=", "<arg_key>", "<invoke ", "to=functions.", "<|channel|>"]
)
def test_other_forms_are_refused(other: str) -> None:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + other
    with pytest.raises(InvalidRequestError, match="in a form that is not supported"):
        form_of(template + (HERMES.end if other in ("<function=", "<arg_key>") else ""))


def test_markers_that_are_tokens() -> None:
    tokenizer = make_tokenizer(MISTRAL_TOOLS)
    assert marker_ids(tokenizer, MISTRAL) == {}
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    assert marker_ids(tokenizer, MISTRAL_NAMED) == {"[TOOL_CALLS]": len(tokenizer) - 1}


def test_strings_are_replaced_in_their_order() -> None:
    value = {"a": ["b", 1, {"c": None, "d": "e"}], "f": True}
    assert list(strings_in(value)) == ["a", "b", "c", "d", "e", "f"]
    changed = with_strings(value, (each.upper() for each in strings_in(value)))
    assert changed == {"A": ["B", 1, {"C": None, "D": "E"}], "F": True}
