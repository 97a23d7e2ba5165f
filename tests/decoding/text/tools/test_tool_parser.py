"""Calls of tools in answers: found in every form, however the text arrives."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from decoding.text.tools.forms import (
    APERTUS,
    GLM,
    GLM_COMPACT,
    HERMES,
    LLAMA_3,
    MISTRAL,
    MISTRAL_NAMED,
    NEMOTRON,
    QWEN_CODER,
    SEED_OSS,
    ToolForm,
)
from decoding.text.tools.parser import ToolCallParser
from decoding.text.tools.values import parameter_types
from support.tools import ANSWERS, CALLS, SCHEMAS

_TYPES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "flag": {"type": "boolean"},
    "pages": {"type": "array"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "size": {"type": ["number", "string"]},
    "mode": {"enum": ["a", "b"]},
    "tree": {"$ref": "#/$defs/tree"},
}
_TREE = {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "integer"}]}
EDIT = {"type": "object", "properties": _TYPES, "$defs": {"tree": _TREE}}
FUNCTIONS: dict[str, Any] = {"f": {}, "g": {}, "find": {}, "edit": EDIT, **SCHEMAS}
Parsed = tuple[str, list[tuple[str, str]]]
_BOOK = '{"name": "find", "arguments": {"text": "a } \\" </tool_call> b", "pages": [1, {"to": 2}]}}'


def parse(form: ToolForm, parts: list[str], **options: Any) -> Parsed:
    """Return the text and the calls of an answer that arrives in parts."""
    parser = ToolCallParser(form, FUNCTIONS, **options)
    content, calls = "", list[tuple[str, str]]()
    for part in [*map(parser.feed, parts), parser.rest()]:
        content += part.content
        for call in part.calls:
            if call.index == len(calls):
                assert call.name is not None
                calls.append((call.name, call.arguments))
            else:
                assert call.name is None
                name, arguments = calls[call.index]
                calls[call.index] = name, arguments + call.arguments
    return content, calls


def split_at(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *cuts, len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


@pytest.mark.parametrize(("form", "text", "count"), ANSWERS)
def test_calls_of_every_form(form: ToolForm, text: str, count: int) -> None:
    assert parse(form, [text]) == ("", CALLS[:count])
    if form.begin:
        assert parse(form, [f"I look.\n{text}\n"]) == ("I look.", CALLS[:count])
    assert parse(form, [text], max_calls=1) == ("", CALLS[:1])


CASES = [
    (
        HERMES,
        f'First: \n<tool_call>{_BOOK}</tool_call><tool_call>{{"arguments": {{"z": 1}}, '
        '"name": "g"}</tool_call> Done. \n',
        ("First:\n\nDone.", [("find", _BOOK[30:-1]), ("g", '{"z": 1}')]),
    ),
    (
        HERMES,  # no call, then one
        '<tool_call> none </tool_call> and <tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ("<tool_call> none </tool_call> and", [("f", "{}")]),
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', ("", [("f", '{"a": 1}')])),
    (HERMES, '<tool_call>{"name": "f", "argu', ('<tool_call>{"name": "f", "argu', [])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1', ("", [("f", '{"a": [1')])),
    (HERMES, '<tool_call>{"nam": "f"}</tool_call>', ('<tool_call>{"nam": "f"}</tool_call>', [])),
    (HERMES, '<tool_call>{"name": 1}</tool_call>', ('<tool_call>{"name": 1}</tool_call>', [])),
    (HERMES, " 1 < 2 <tool_ca", (" 1 < 2 <tool_ca", [])),
    (HERMES, "plain \n", ("plain \n", [])),
    (
        HERMES,  # ends that are missing, and members that are too many
        '<tool_call>{"name": "f", "arguments": {} </tool_call>'
        '<tool_call>{"name": "g", "arguments": {}, "id": "}"} x',
        ("x", [("f", "{}"), ("g", "{}")]),
    ),
    (
        LLAMA_3,
        ' <|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}; '
        '{"name": "g", "parameters": {}}',
        ("", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (LLAMA_3, '{"a": 1} and {"name": "f"}', ('{"a": 1} and {"name": "f"}', [])),
    (LLAMA_3, 'So {"name": "f", "parameters": {}}', ('So {"name": "f", "parameters": {}}', [])),
    (LLAMA_3, "\n <|python", ("\n <|python", [])),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "123456789"}, {"name": "g"}]',
        ("", [("f", "{}"), ("g", "{}")]),
    ),
    (MISTRAL, "x[TOOL_CALLS]y", ("x[TOOL_CALLS]y", [])),
    (MISTRAL, "[TOOL_CALLS][1, 2]", ("[TOOL_CALLS][1, 2]", [])),
    (MISTRAL, '[TOOL_CALLS][{"name": "f"}, 2] [3', (", 2] [3", [("f", "{}")])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>', ("", [("f", "{}")])),
    # one key for the other
    (HERMES, '<tool_call>{"name": "f", "parameters": {"a": 1}}', ("", [("f", '{"a": 1}')])),
    (LLAMA_3, '{"arguments": {"a": 1}, "name": "f"}', ("", [("f", '{"a": 1}')])),
    # no calls: no arguments, other names, half a character
    (LLAMA_3, '{"name": "f", "age": 3}', ('{"name": "f", "age": 3}', [])),
    (LLAMA_3, '{"name": "h", "parameters": {}}', ('{"name": "h", "parameters": {}}', [])),
    (HERMES, '<tool_call>{"name": "h"}', ('<tool_call>{"name": "h"}', [])),
    (
        HERMES,
        '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "f"}',
        ('<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "f"}', []),
    ),
    # thoughts
    (
        HERMES,
        ' <think>No <tool_call>{"name": "f"}</tool_call></think>\n\n<tool_call>{"name": "g"}',
        (' <think>No <tool_call>{"name": "f"}</tool_call></think>', [("g", "{}")]),
    ),
    (HERMES, '<think> <tool_call>{"name": "f"}</th', ('<think> <tool_call>{"name": "f"}</th', [])),
    (
        MISTRAL_NAMED,
        '[TOOL_CALLS]f[CALL_ID]a1[ARGS]{"a": {}} [TOOL_CALLS]g[ARGS]{} bye',
        ("bye", [("f", '{"a": {}}'), ("g", "{}")]),
    ),
    # the end of a list, missing or after blanks, and another list
    (
        NEMOTRON,
        '<TOOLCALL> [{"name": "f"}] \n</TOOLCALL> and <TOOLCALL>[{"name": "g"}</TOOLCALL>',
        ("and", [("f", "{}"), ("g", "{}")]),
    ),
    (NEMOTRON, '<TOOLCALL>[{"name": "f"}]</TOOL', ("", [("f", "{}")])),
    (NEMOTRON, '<TOOLCALL>[{"name": "f"}]</TOOLCALL>\n\nBye', ("Bye", [("f", "{}")])),
    (NEMOTRON, 'So <TOOLCALL>[{"name": "f"}]</TOOLCALL>\n', ("So", [("f", "{}")])),
    (NEMOTRON, '<TOOLCALL>{"name": "f"}</TOOLCALL>', ("", [("f", "{}")])),
    (APERTUS, '<|tools_prefix|>[{"f": {"a": {}}}, {"g": {', ("", [("f", '{"a": {}}'), ("g", "{")])),
    (APERTUS, '<|tools_prefix|>[{"h": {}}]', ('<|tools_prefix|>[{"h": {}}]', [])),
    (APERTUS, '<|tools_prefix|>[{"f": null}]', ("", [("f", "{}")])),
    # other objects in a list
    (
        NEMOTRON,
        '<TOOLCALL>[{"name": "f"}, {"name": "h", "x": "}"} , {"name": "g"}]</TOOLCALL>',
        (', {"name": "h", "x": "}"}', [("f", "{}"), ("g", "{}")]),
    ),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "h"},{"x": 1}, {"name": "f", "arguments": {}}, {"y": [2]}, 3]',
        (
            '[TOOL_CALLS][{"name": "h"},{"x": 1}\n\n, {"y": [2]}, 3]',
            [("f", "{}")],
        ),
    ),
    (APERTUS, '<|tools_prefix|>[{"h": {}}, {"f', ('<|tools_prefix|>[{"h": {}}, {"f', [])),
    (APERTUS, '<|tools_prefix|>[{"h": {}} , ', ('<|tools_prefix|>[{"h": {}} , ', [])),
    (APERTUS, '<|tools_prefix|>[{"f": 1}]', ('<|tools_prefix|>[{"f": 1}]', [])),
    (MISTRAL_NAMED, '[TOOL_CALLS]f{"a": 1}', ("", [("f", '{"a": 1}')])),
    (MISTRAL_NAMED, '[TOOL_CALLS]f: {"a": 1}', ('[TOOL_CALLS]f: {"a": 1}', [])),
    (MISTRAL_NAMED, f"[TOOL_CALLS]{'f' * 500}", (f"[TOOL_CALLS]{'f' * 500}", [])),
]


def qwen(function: str, **values: str) -> str:
    """Return a call in Qwen3-Coder's form."""
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
    return f"<tool_call>\n<function={function}>\n{''.join(parts)}</function>\n</tool_call>"


def seed(function: str, **values: str) -> str:
    """Return a call in Seed-OSS's form."""
    parts = [f"<parameter={key}>{value}</parameter>\n" for key, value in values.items()]
    own = f"<function={function}>\n{''.join(parts)}</function>"
    return f"<seed:tool_call>\n{own}\n</seed:tool_call>"


def glm(function: str, line: str, **values: str) -> str:
    """Return a call in a form of GLM."""
    parts = [
        f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}"
        for key, value in values.items()
    ]
    return f"<tool_call>{function}{line}{''.join(parts)}</tool_call>"


_CODE = "if a < b:\n    print('</tool_call> </arg>')\n\n"
_ESCAPED = "if a < b:\\n    print('</tool_call> </arg>')\\n\\n"
# values, and what is read of them
_VALUES = [
    ({"text": _CODE}, f'{{"text": "{_ESCAPED}"}}'),
    ({"text": ""}, '{"text": ""}'),
    ({"text": "12", "count": "12"}, '{"text": "12", "count": 12}'),
    ({"text": "null", "note": "null", "count": " null "}, None),
    (
        {"note": "None", "flag": "True", "count": "None"},
        '{"note": null, "flag": true, "count": null}',
    ),
    (
        {"note": '"a"', "size": "1.5e3", "mode": "a"},
        '{"note": "\\"a\\"", "size": 1.5e3, "mode": "a"}',
    ),
    ({"size": "12 cm", "count": "many"}, '{"size": "12 cm", "count": "many"}'),
    ({"pages": '[1, {"a": "</b>"}]', "tree": "3"}, '{"pages": [1, {"a": "</b>"}], "tree": 3}'),
    ({"pages": "[1, 'a']", "flag": "NaN"}, '{"pages": "[1, \'a\']", "flag": "NaN"}'),
    ({"other": "5", "else": "five"}, '{"other": 5, "else": "five"}'),
]
_VALUES[3] = (_VALUES[3][0], '{"text": "null", "note": null, "count": null}')
for _own, _arguments in _VALUES:
    _calls = ("", [("edit", str(_arguments))])
    CASES += [(QWEN_CODER, qwen("edit", **_own), _calls), (GLM, glm("edit", "\n", **_own), _calls)]
    CASES += [(SEED_OSS, seed("edit", **_own), _calls)]
_F = [("f", "{}")]
_G = "<function=g>\n<parameter=a>\nb\n</parameter>\n"
CASES += [
    (QWEN_CODER, f"Now: \n{qwen('f')}\n\n{qwen('g')} Bye", ("Now:\n\nBye", [*_F, ("g", "{}")])),
    # no <tool_call>, no </tool_call>, no </parameter>, two functions in one
    (QWEN_CODER, f"So\n{_G}</function>\n</tool_call>", ("So", [("g", '{"a": "b"}')])),
    (QWEN_CODER, f"So\n{_G}</function>", ("So", [("g", '{"a": "b"}')])),
    (
        QWEN_CODER,
        "<tool_call>\n<function=edit>\n<parameter=text>\nb\n</function>\n</tool_call>",
        ("", [("edit", '{"text": "b"}')]),
    ),
    (
        QWEN_CODER,
        f"<tool_call>{_G}</function>\n{_G}</function></tool_call>",
        ("", [("g", '{"a": "b"}')] * 2),
    ),
    # on one line, and with its own closing tag in the value
    (
        QWEN_CODER,
        "<tool_call><function=edit><parameter=text>a</parameter> b\n</parameter>\n</function>",
        ("", [("edit", '{"text": "a</parameter> b"}')]),
    ),
    (
        GLM_COMPACT,
        glm("edit", "", text="a</arg_value><arg> ", count="1"),
        ("", [("edit", '{"text": "a</arg_value><arg> ", "count": 1}')]),
    ),
    (
        SEED_OSS,  # a parameter that comes twice
        "<seed:tool_call><function=edit><parameter=text>a</parameter><parameter=text>b</parameter>"
        "<parameter=count>1</parameter></function></seed:tool_call>",
        ("", [("edit", '{"text": "a", "count": 1}')]),
    ),
    # no calls
    (QWEN_CODER, "a <function=x> b", ("a <function=x> b", [])),
    (QWEN_CODER, "a <function=f b", ("a <function=f b", [])),
    (QWEN_CODER, qwen("h", a="b"), (qwen("h", a="b"), [])),
    (QWEN_CODER, "<tool_call>\n{}", ("<tool_call>\n{}", [])),
    (QWEN_CODER, f"<think>{qwen('f')}</think> {qwen('f')}", (f"<think>{qwen('f')}</think>", _F)),
    (
        SEED_OSS,
        f"\n<seed:think>{seed('f')}</seed:think>{seed('g')}",
        (f"\n<seed:think>{seed('f')}</seed:think>", [("g", "{}")]),
    ),
    (GLM, "<tool_call>f and g</tool_call>", ("<tool_call>f and g</tool_call>", [])),
    (GLM, "<tool_call>h\n</tool_call>", ("<tool_call>h\n</tool_call>", [])),
    (GLM, "<tool_call>f", ("<tool_call>f", [])),
    # cut, or followed by what does not belong to a call
    (QWEN_CODER, qwen("edit", text="a \n<b")[:60], ("", [("edit", '{"text": "a \\n<b')])),
    (
        GLM,
        glm("edit", "\n", text="a", count="1")[:-24],
        ("", [("edit", '{"text": "a", "count": ')]),
    ),
    (GLM, f"{glm('f', '')[:-12]}\n{glm('g', '')}", ("<tool_call>f", [("g", "{}")])),
    (QWEN_CODER, f"<tool_call>{_G}{qwen('f')}", ("", [("g", '{"a": "b"}'), *_F])),
    (
        GLM,
        "<tool_call>f<arg_key>a</arg_key> b</tool_call>",
        ("<arg_key>a</arg_key> b</tool_call>", _F),
    ),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_answers_do_not_depend_on_how_they_arrive(
    form: ToolForm, text: str, expected: Parsed
) -> None:
    assert parse(form, [text]) == expected
    assert parse(form, list(text)) == expected
    generator = random.Random(0)
    for _ in range(100):
        count = generator.randrange(min(9, len(text)))
        cuts = sorted(generator.sample(range(len(text) + 1), count))
        assert parse(form, split_at(text, cuts)) == expected


def test_thoughts_that_the_prompt_begins() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    expected = f"So {call}</think>", [("f", "{}")]
    for parts in ([f"So {call}</think>{call}"], list(f"So {call}</think>{call}")):
        assert parse(HERMES, parts, is_in_thoughts=True) == expected


def test_calls_that_no_text_may_precede() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    for parts in ([f'{{"a": "{call}"}}'], list(f'{{"a": "{call}"}}')):
        assert parse(HERMES, parts, is_only_at_start=True) == (f'{{"a": "{call}"}}', [])
    for parts in ([f"\n{call}{call}"], list(f"\n{call}{call}")):
        assert parse(HERMES, parts, is_only_at_start=True) == ("", [("f", "{}")] * 2)


def test_the_cost_of_what_only_begins_like_calls_is_linear() -> None:
    """A quadratic parser would take minutes."""
    for text in ("<tool_call>{" * 20_000, "<tool_call>{}" * 20_000, '<tool_call>{"a": [' * 20_000):
        assert parse(HERMES, [text]) == (text, [])
    text = "<TOOLCALL>[{}" + ", {}" * 20_000
    assert parse(NEMOTRON, [text]) == (text, [])


def test_arguments_are_streamed() -> None:
    parser = ToolCallParser(HERMES, {"f": {}})
    parts = [parser.feed(each) for each in ('<tool_call>{"name": "f", "arguments": {"a', '": 1')]
    assert [part.calls[0].arguments for part in parts] == ['{"a', '": 1']
    assert [part.calls[0].name for part in parts] == ["f", None]
    assert not parser.has_calls  # none that is complete
    assert parser.feed("}}").calls[0].arguments == "}"
    assert parser.has_calls
    assert parser.feed('<tool_call>{"name": "f", "arguments": {').calls
    assert parser.has_calls  # another that is not complete


def test_strings_between_tags_are_streamed() -> None:
    parser = ToolCallParser(QWEN_CODER, FUNCTIONS)
    text = "<tool_call>\n<function=edit>\n<parameter=text>\n"
    assert parser.feed(text).calls[0].name == "edit"
    assert [parser.feed(each).calls[0].arguments for each in ("a\n", "b<", "c")] == [
        "a",
        "\\nb",
        "<c",
    ]
    assert not parser.has_calls
    parser.feed("\n</parameter>\n</function>")
    assert parser.has_calls


def test_references_are_followed_once() -> None:
    """A schema that doubles at every level would take forever."""
    names = [f"d{index}" for index in range(60)]
    both = [{"anyOf": [{"$ref": f"#/$defs/{name}"}] * 2} for name in names[1:]]
    definitions = dict(zip(names, [*both, {"type": "integer"}], strict=True))
    schema = {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions}
    assert parameter_types(schema, "a") == {"integer"}


def test_calls_that_must_not_come_without_their_beginning() -> None:
    text = f"So\n{_G}</function>\n</tool_call>"
    assert parse(replace(QWEN_CODER, may_be_bare=False), [text]) == (text, [])
