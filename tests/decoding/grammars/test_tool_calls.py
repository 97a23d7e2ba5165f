"""Grammars of calls: they allow what the parser reads, with valid arguments, and no more."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from decoding.grammars.grammar import Grammar, GrammarCompiler
from decoding.grammars.tool_calls import ToolCallGrammar
from decoding.text.tools.forms import (
    APERTUS,
    GLM_COMPACT,
    HARMONY,
    HERMES,
    MISTRAL,
    QWEN_CODER,
    SEED_OSS,
    ToolForm,
    marker_ids,
)
from offload.errors import InvalidRequestError
from support.commands import TARGET
from support.slow import slow_except
from support.tools import ANSWERS, SCHEMAS

every_answer = pytest.mark.parametrize(
    ("form", "text", "count"), slow_except(ANSWERS, *range(13), -1)
)
_FORMS = [form for form, _, count in ANSWERS if count == 1]


class Compiler:
    """Compiles grammars for a tokenizer, in which markers are tokens of their own, or not."""

    def __init__(self, has_tokens: bool):
        self.has_tokens = has_tokens
        self.tokenizer = AutoTokenizer.from_pretrained(TARGET)
        if has_tokens:
            forms = (*_FORMS, HARMONY)
            markers = dict.fromkeys(marker for form in forms for marker in form.markers)
            plain = [*HERMES.markers, *HERMES.thoughts, *SEED_OSS.thoughts]
            self.tokenizer.add_tokens([AddedToken(each) for each in plain])
            self.tokenizer.add_tokens([*(markers.keys() - plain)], special_tokens=True)
        stops = {self.tokenizer.eos_token_id}
        self._compiler = GrammarCompiler(self.tokenizer, len(self.tokenizer), stops)

    def matches(self, form: ToolForm, text: str, **options: Any) -> bool:
        """Return whether a text is an answer under the grammar of `SCHEMAS`, or of others."""
        ids = tuple(marker_ids(self.tokenizer, form).items())
        schemas = options.pop("schemas", SCHEMAS)
        grammar = ToolCallGrammar.of(schemas, form, ids=ids, **options)
        matcher = self._compiler.compile(grammar).start.deep_copy()
        tokens = self.tokenizer(text, add_special_tokens=False).input_ids
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.fixture(scope="module", params=[True, False])
def compiler(request: pytest.FixtureRequest) -> Compiler:
    return Compiler(request.param)


@every_answer
def test_calls(compiler: Compiler, form: ToolForm, text: str, count: int) -> None:
    assert compiler.matches(form, text)
    assert compiler.matches(form, text, has_many=False) == (count == 1)
    changes = ("weather", "wetter"), ("city", "town"), ("Rome", "Rome" * 4)
    for wrong in ("", "{}", f"I look. {text}", *(text.replace(*each) for each in changes)):
        assert not compiler.matches(form, wrong)


@every_answer
def test_calls_or_text(compiler: Compiler, form: ToolForm, text: str, count: int) -> None:
    for answer in (text, "", "I look: no < [call> {}"):
        assert compiler.matches(form, answer, has_text=True)
    assert compiler.matches(form, f"I look.\n{text}", has_text=True)
    assert not compiler.matches(form, text.replace("Rome", "Rome" * 4), has_text=True)
    assert not compiler.matches(form, text[: len(text) - 8], has_text=True)


def test_an_answer_ends_after_a_line_break() -> None:
    """A model that writes one need not call again."""
    assert Compiler(True).matches(HERMES, f"{ANSWERS[1][1]}\n")


@pytest.mark.parametrize("form", slow_except(_FORMS, *range(7)))
def test_text_has_other_special_tokens(form: ToolForm) -> None:
    assert Compiler(True).matches(form, "I <s><s> look <s>", has_text=True)


@pytest.mark.parametrize(("form", "text"), [(HERMES, ANSWERS[0][1]), (MISTRAL, ANSWERS[3][1])])
def test_calls_or_an_answer(compiler: Compiler, form: ToolForm, text: str) -> None:
    for answer, is_valid in ((text, True), ('{"a": 1}', True), ("I look.", False), ("[1]", False)):
        assert compiler.matches(form, answer, answer=Grammar.json_object()) == is_valid


@pytest.mark.parametrize("blanks", ["", "\n\n"])
@every_answer
def test_thoughts_come_first(
    compiler: Compiler, form: ToolForm, text: str, count: int, blanks: str
) -> None:
    end = form.thoughts[1] + blanks
    for thought in ("", "So {<tool> I look <s>." if compiler.has_tokens else "So {<tool> I look."):
        assert compiler.matches(form, thought + end + text, is_in_thoughts=True)
    assert not compiler.matches(form, text, is_in_thoughts=True)
    assert not compiler.matches(form, f"So{end}so{text}", is_in_thoughts=True)


def test_other_arguments_are_allowed_by_the_schema_alone() -> None:
    compiler, (form, text, _) = Compiler(False), ANSWERS[0]
    assert not compiler.matches(form, text.replace('"Rome"', '"Rome", "x": 1'))
    now = '<tool_call>\n{"name": "now", "arguments": {"x": 1}}\n</tool_call>'
    assert not compiler.matches(HERMES, now)
    closed: dict[str, Any] = {"properties": {}}
    for schema in ({**closed, "additionalProperties": True}, {**closed, "anyOf": [closed]}, {}):
        assert compiler.matches(HERMES, now, schemas={"now": schema})


def test_a_function_whose_schema_is_not_supported_gets_any_object() -> None:
    """Unless it is strict."""
    compiler = Compiler(False)
    odd = {f"odd{index}": {"properties": {"x": {"uniqueItems": True}}} for index in range(2)}
    schemas = {"weather": SCHEMAS["weather"], **odd, "now": SCHEMAS["now"]}
    call = '<tool_call>\n{"name": "NAME", "arguments": {"x": [1, 1]}}\n</tool_call>'
    for name in schemas:
        is_any = name in odd
        assert compiler.matches(HERMES, call.replace("NAME", name), schemas=schemas) == is_any
    assert compiler.matches(HERMES, ANSWERS[0][1], schemas=schemas)
    with pytest.raises(InvalidRequestError, match=r"^function odd1: the JSON schema is invalid"):
        compiler.matches(HERMES, "", schemas=schemas, strict=frozenset({"odd1", "now"}))


def test_the_end_of_a_list_may_be_a_token_that_ends_the_answer() -> None:
    form, text, _ = ANSWERS[-1]
    assert form is APERTUS
    for has_tokens in (True, False):
        compiler = Compiler(has_tokens)
        assert compiler.matches(form, text.removesuffix(form.end)) == has_tokens


def test_an_unsupported_format_of_the_answer() -> None:
    answer = Grammar.json_schema({"uniqueItems": True})
    with pytest.raises(InvalidRequestError, match="uniqueItems"):
        Compiler(False).matches(HERMES, "", answer=answer)


def qwen(**values: str) -> str:
    """Return a call of f in Qwen3-Coder's form."""
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
    return f"<tool_call>\n<function=f>\n{''.join(parts)}</function>\n</tool_call>"


def glm(**values: str) -> str:
    """Return a call of f in GLM-4.7's form."""
    parts = [
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in values.items()
    ]
    return f"<tool_call>f{''.join(parts)}</tool_call>"


def matches(compiler: Compiler, schema: Any, values: dict[str, str], **options: Any) -> set[bool]:
    """Return whether calls with these values match the grammars of the forms with tags."""
    calls = {QWEN_CODER: qwen(**values), GLM_COMPACT: glm(**values)}
    return {
        compiler.matches(form, text, schemas={"f": schema}, **options)
        for form, text in calls.items()
    }


TEXT = {"type": "string"}
# the schema of a value, strings that match it, and others
VALUES: list[tuple[Any, list[str], list[str]]] = [
    (TEXT, ["", "a\n <b> \n", "12", "null"], ["a</parameter></arg_value>"]),
    ({**TEXT, "maxLength": 3}, ["", "éß\n"], ["abcd"]),
    ({**TEXT, "maxLength": 5000}, ["", "a" * 5000], ["a" * 5001, "a</parameter></arg_value>"]),
    ({**TEXT, "minLength": 2, "pattern": "^a|b$"}, ["ac", "cb"], ["a", "ca", "bc"]),
    ({**TEXT, "pattern": "[|x]/y"}, ["a|/y.", "x/y"], ["y", "x"]),
    ({**TEXT, "pattern": "a\\$|^b$"}, ["ca$d", "b"], ["a", "bb"]),
    ({**TEXT, "format": "date"}, ["2026-01-07"], ["2026-13-01", "today"]),
    ({"enum": ["a", "a b"]}, ["a", "a b"], ["b", '"a"']),
    ({"enum": ["a", 1, None]}, ["a", "1", "null"], ["b", "2"]),
    ({"oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ["ab"]),
    ({"type": "integer", "minimum": 3}, ["3", "10"], ["2", "a", "3.5", '"3"']),
    ({"type": "boolean"}, ["true"], ["True", "yes"]),
    ({"type": "array", "items": TEXT}, ['["a", "b"]', "[]"], ["[1]", "a"]),
    ({"anyOf": [{**TEXT, "maxLength": 5}, {"type": "null"}]}, ["abc", "null"], ["abcdef"]),
    ({"type": ["string", "null"], "maxLength": 3}, ["abc", "null"], ["abcd"]),
    ({"anyOf": [TEXT, {"type": "integer", "minimum": 3}]}, ["a", "3 a"], ["2", " 2"]),
    ({"anyOf": [{**TEXT, "maxLength": 3}, {"type": "integer"}]}, ["a", "12345"], ["abcd"]),
    (
        {"anyOf": [TEXT, {"type": "array", "items": {"type": "integer"}}]},
        ["a", "[1]", "a [x]"],
        ['["a"]', " [x]"],
    ),
    ({"$ref": "#/$defs/short"}, ["ab"], ["abc"]),
    ({"anyOf": [{"$ref": "#/$defs/short"}, {"type": "null"}]}, ["ab", "null"], ["abc"]),
    ({"type": "array", "items": {"$ref": "#/$defs/short"}}, ['["ab"]'], ['["abc"]']),
    ({}, ["a", "1"], []),
    (True, ["a", "1"], []),
]


@pytest.mark.parametrize(("value", "right", "wrong"), VALUES)
def test_values_between_tags(
    compiler: Compiler, value: Any, right: list[str], wrong: list[str]
) -> None:
    schema = {"properties": {"a": value}, "$defs": {"short": {**TEXT, "maxLength": 2}}}
    options = {"strict": frozenset({"f"})}
    for text in right:
        assert matches(compiler, schema, {"a": text}, **options) == {True}, text
    for text in wrong:
        assert matches(compiler, schema, {"a": text}, **options) == {False}, text


def test_values_without_line_breaks_around_them() -> None:
    compiler = Compiler(False)
    for value, right, wrong in (VALUES[0], VALUES[2], VALUES[10]):
        schemas = {"f": {"properties": {"a": value}, "additionalProperties": value}}
        for text in (*right, *wrong):
            own = "".join(f"<parameter={key}>{text}</parameter>\n" for key in "ab")
            call = f"{SEED_OSS.begin}\n<function=f>\n{own}</function>\n{SEED_OSS.end}"
            assert compiler.matches(SEED_OSS, call, schemas=schemas) == (text in right), text


def test_parameters_between_tags() -> None:
    """They come in the order of the schema, and others only if it allows them."""
    compiler = Compiler(False)
    number = {"type": "integer"}
    schema: dict[str, Any] = {
        "properties": {"a": number, "b": number, "ab": number},
        "required": ["b"],
    }
    right = [{"b": "1"}, {"a": "1", "b": "2"}, {"a": "1", "b": "2", "ab": "3"}]
    wrong = [{}, {"a": "1"}, {"b": "1", "a": "2"}]
    other = {"b": "1", "c": "2", "abc": "3"}
    for values, expected in [(each, True) for each in right] + [(each, False) for each in wrong]:
        assert matches(compiler, schema, values) == {expected}, values
    for extra, expected in ((False, False), (True, True), (number, True), (TEXT, True)):
        own = {**schema, "additionalProperties": extra}
        assert matches(compiler, own, other) == {expected}, extra
        assert matches(compiler, own, {**other, "a": "1"}) == {False}
    assert matches(compiler, {"additionalProperties": number}, {"c": "x"}) == {False}
    assert matches(compiler, {"$ref": "#/$defs/f", "$defs": {"f": schema}}, {"a": "1"}) == {False}


UNSUPPORTED = [
    {"anyOf": [{"properties": {"a": TEXT}}]},
    {"properties": {"a>": TEXT}},
    {"properties": {"a": TEXT}, "minProperties": 1},
    {"properties": {}, "required": ["a"]},
    *(
        {"properties": {"a": each}}
        for each in (
            {**TEXT, "format": "hostname"},
            {**TEXT, "not": {"const": "a"}},
            {**TEXT, "pattern": "a\\b"},
            {**TEXT, "enum": ["a"], "pattern": "a"},
            {**TEXT, "maxLength": 5000, "pattern": "a"},
            {"oneOf": [TEXT, {**TEXT, "maxLength": 3}]},
            {"anyOf": [{"$ref": "#/properties/a"}, TEXT]},
            {**TEXT, "maxLength": "a"},
            False,
        )
    ),
]


@pytest.mark.parametrize("schema", slow_except(UNSUPPORTED, 0, 4))
def test_schemas_that_calls_with_tags_cannot_follow(schema: Any) -> None:
    """Any parameters are allowed then, unless the function is strict."""
    compiler = Compiler(False)
    assert matches(compiler, schema, {"a": "b", "c": "d"}) == {True}
    with pytest.raises(InvalidRequestError, match=r"^function f: the JSON schema is invalid"):
        matches(compiler, schema, {}, strict=frozenset({"f"}))


CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'
THOUGHT = "<|channel|>analysis<|message|>So { to=x.<|end|><|start|>assistant"
COMMENT = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize("before", ["", THOUGHT, THOUGHT + COMMENT])
def test_calls_in_channels(before: str) -> None:
    compiler = Compiler(True)
    now = " to=functions.now<|channel|>commentary json<|message|>{}"
    bare = CALL.replace(" <|constrain|>json", "")
    for call in (CALL, bare, now):
        assert compiler.matches(HARMONY, before + call)
        assert compiler.matches(HARMONY, before + call, has_text=True)
        assert not compiler.matches(HARMONY, before + call[:-1])
    changes = ("weather", "wetter"), ("city", "town"), ("Rome", "Rome" * 4)
    wrong = [CALL.replace(*each) for each in changes]
    for text in ("", f"{FINAL}Fine.", f"{CALL}<|end|><|start|>assistant{CALL}", *wrong):
        assert not compiler.matches(HARMONY, before + text)
        assert not compiler.matches(HARMONY, before + text, answer=Grammar.json_object())
    assert not compiler.matches(HARMONY, before + wrong[0], has_text=True)
    assert compiler.matches(HARMONY, f"{before}{FINAL}Fine.", has_text=True)
    assert compiler.matches(HARMONY, f'{before}{FINAL}{{"a": 1}}', answer=Grammar.json_object())


def test_no_comment_in_channels_is_for_a_function() -> None:
    """A call that is not valid cannot pass as a comment that precedes the valid one."""
    other = CALL.replace("Rome", "Rome" * 4) + "<|end|><|start|>assistant"
    assert not Compiler(True).matches(HARMONY, other + CALL)
