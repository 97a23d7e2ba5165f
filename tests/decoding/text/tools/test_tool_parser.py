"""Calls of tools in answers: found in every form, however the text arrives."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from decoding.text.tools.forms import HERMES, LLAMA_3, MISTRAL, MISTRAL_NAMED, ToolForm
from decoding.text.tools.parser import ToolCallParser
from support.tools import ANSWERS, CALLS

Parsed = tuple[str, list[tuple[str, str]]]
_BOOK = '{"name": "find", "arguments": {"text": "a } \\" </tool_call> b", "pages": [1, {"to": 2}]}}'


def parse(form: ToolForm, parts: list[str], max_calls: int | None = None) -> Parsed:
    """Return the text and the calls of an answer that arrives in parts."""
    parser = ToolCallParser(form, max_calls)
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
        ("First: Done.", [("find", _BOOK[30:-1]), ("g", '{"z": 1}')]),
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
    (
        MISTRAL_NAMED,
        '[TOOL_CALLS]f[CALL_ID]a1[ARGS]{"a": {}} [TOOL_CALLS]g[ARGS]{} bye',
        ("bye", [("f", '{"a": {}}'), ("g", "{}")]),
    ),
    (MISTRAL_NAMED, '[TOOL_CALLS]f {"a": 1}', ('[TOOL_CALLS]f {"a": 1}', [])),
    (MISTRAL_NAMED, f"[TOOL_CALLS]{'f' * 500}", (f"[TOOL_CALLS]{'f' * 500}", [])),
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


def test_arguments_are_streamed() -> None:
    parser = ToolCallParser(HERMES)
    parts = [parser.feed(each) for each in ('<tool_call>{"name": "f", "arguments": {"a', '": 1')]
    assert [part.calls[0].arguments for part in parts] == ['{"a', '": 1']
    assert [part.calls[0].name for part in parts] == ["f", None]
    assert parser.has_calls
