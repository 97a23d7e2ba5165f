"""Grammars of calls: they allow what the parser reads, with valid arguments, and no more."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from decoding.grammars.grammar import Grammar, GrammarCompiler
from decoding.grammars.tool_calls import ToolCallGrammar
from decoding.text.tools.forms import HERMES, MISTRAL, ToolForm, marker_ids
from offload.errors import InvalidRequestError
from support.commands import TARGET
from support.tools import ANSWERS, SCHEMAS

every_answer = pytest.mark.parametrize(("form", "text", "count"), ANSWERS)
_FORMS = [form for form, _, count in ANSWERS if count == 1]


class Compiler:
    """Compiles grammars for a tokenizer, in which markers are tokens of their own, or not."""

    def __init__(self, has_tokens: bool):
        self.has_tokens = has_tokens
        self.tokenizer = AutoTokenizer.from_pretrained(TARGET)
        if has_tokens:
            markers = dict.fromkeys(marker for form in _FORMS for marker in form.markers)
            plain = [*HERMES.markers, "<think>", "</think>"]  # those of Qwen's
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


@pytest.mark.parametrize("form", _FORMS)
def test_text_has_other_special_tokens(form: ToolForm) -> None:
    assert Compiler(True).matches(form, "I <s><s> look <s>", has_text=True)


@pytest.mark.parametrize(("form", "text"), [(HERMES, ANSWERS[0][1]), (MISTRAL, ANSWERS[3][1])])
def test_calls_or_an_answer(compiler: Compiler, form: ToolForm, text: str) -> None:
    for answer, is_valid in ((text, True), ('{"a": 1}', True), ("I look.", False), ("[1]", False)):
        assert compiler.matches(form, answer, answer=Grammar.json_object()) == is_valid


@pytest.mark.parametrize("end", ["</think>", "</think>\n\n"])
@every_answer
def test_thoughts_come_first(
    compiler: Compiler, form: ToolForm, text: str, count: int, end: str
) -> None:
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


def test_an_unsupported_format_of_the_answer() -> None:
    answer = Grammar.json_schema({"uniqueItems": True})
    with pytest.raises(InvalidRequestError, match="uniqueItems"):
        Compiler(False).matches(HERMES, "", answer=answer)
