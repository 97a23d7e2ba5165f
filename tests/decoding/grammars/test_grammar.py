"""Grammars are checked before use, allow every tokenization of their strings, and leave the
channels of a response format alone.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from decoding.grammars.grammar import Grammar, GrammarCompiler
from decoding.models.loading import load_tokenizer
from offload.errors import InvalidRequestError
from support.channels import MARKERS
from support.engines import DEMO

VOCAB = 2100
OBJECT = Grammar('{"type": "object", "additionalProperties": {"type": "integer"}}')


def matcher_of(grammar: Grammar, tokenizer: Any, stop: int = 0) -> LLMatcher:
    return GrammarCompiler(tokenizer, VOCAB, {stop}).compile(grammar).start.deep_copy()


def takes(matcher: LLMatcher, tokens: list[int]) -> bool:
    """Return whether an answer may be these tokens, and end after them."""
    matcher.reset()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        (OBJECT, ['{"a": 1}', '{"a":1,"b":22}', '{\n  "a": 1,\n  "b": 2\n}', "{}"], ['{"a": "1"}']),
        (Grammar.json_object(), ['{"a": [null, {}]}'], ["[]", '{"a": 1', "{\n\n}"]),
        (Grammar.choice(["yes", 'no "way"\\']), ["yes", 'no "way"\\'], ["ye", "no", "maybe"]),
        (Grammar.regex(r"[0-9]+(/x)?"), ["12/x", "1"], ["12/", "x"]),
        (Grammar('start: "a" start | "b"', is_schema=False), ["aaab", "b"], ["aa", "ba"]),
        (Grammar.json_schema(True), ["1", '"x"', '{"a": 1}'], ["x"]),
    ],
)
def test_answers_are_those_of_the_grammar(grammar: Grammar, yes: list[str], no: list[str]) -> None:
    tokenizer = load_tokenizer(DEMO / "target")
    matcher = matcher_of(grammar, tokenizer)
    for text in [*yes, *no]:
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        assert takes(matcher, tokens) == (text in yes), text


def test_every_tokenization_of_a_string_is_allowed() -> None:
    tokenizer = load_tokenizer(DEMO / "target")
    matcher = matcher_of(Grammar.choice(["return None"]), tokenizer)
    whole = tokenizer("return None", add_special_tokens=False).input_ids
    single = [tokenizer(letter, add_special_tokens=False).input_ids[0] for letter in "return"]
    rest = tokenizer(" None", add_special_tokens=False).input_ids
    assert len(whole) < len(single)
    assert takes(matcher, whole)
    assert takes(matcher, [*single, *rest])


def test_a_model_answers_in_its_final_channel() -> None:
    tokenizer = load_tokenizer(DEMO / "target")
    tokenizer.add_special_tokens({"additional_special_tokens": MARKERS})
    matcher = matcher_of(OBJECT, tokenizer, tokenizer.convert_tokens_to_ids("<|return|>"))
    thought = "<|channel|>analysis<|message|>So {.\n\nYes.<|end|><|start|>assistant"
    final = '<|channel|>final<|message|>{"a": 1}'
    for text in (final, thought + final, thought + thought + final):
        assert takes(matcher, tokenizer(text, add_special_tokens=False).input_ids), text
    unrestricted = "<|channel|>final<|message|>Hello.<|end|><|start|>assistant"
    for text in ('{"a": 1}', thought, "<|channel|>final<|message|>Hello", unrestricted + final):
        assert not takes(matcher, tokenizer(text, add_special_tokens=False).input_ids), text


def test_grammars_with_many_alternatives_are_followed() -> None:
    tokenizer = load_tokenizer(DEMO / "target")
    properties = {f"p{at}": {"type": "integer"} for at in range(1_000)}
    wide = {"type": "object", "properties": properties, "additionalProperties": False}
    choices = Grammar.choice([f"option {at}" for at in range(10_000)])
    for grammar, text in (
        (choices, "option 9999"),
        (Grammar.json_schema(wide), '{"p0": 1, "p999": 2}'),
        (Grammar.choice(['\x7f\u2028\n"\\', "\U0001f600"]), '\x7f\u2028\n"\\'),
        (chain(50), "1"),
    ):
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        assert takes(matcher_of(grammar, tokenizer), tokens), text
    with pytest.raises(InvalidRequestError, match="at least one"):
        Grammar.choice([])


def test_compiled_grammars_are_kept_for_later_requests() -> None:
    compiler = GrammarCompiler(load_tokenizer(DEMO / "target"), VOCAB, {0})
    first = compiler.compile(OBJECT)
    assert compiler.compile(Grammar(OBJECT.source)) is first
    for number in range(8):
        compiler.compile(Grammar.json_schema({"const": number}))
    again = compiler.compile(OBJECT)
    assert again is not first
    assert json.loads(again.grammar.source)["type"] == "object"


def chain(links: int) -> Grammar:
    """Return a schema whose references form a chain."""
    kinds: dict[str, Any] = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(links)}
    return Grammar.json_schema({"$ref": "#/$defs/d0", "$defs": {**kinds, f"d{links}": {}}})


def rules(links: int) -> Grammar:
    """Return a grammar whose rules form a chain."""
    lines = ["start: a0", *(f"a{at}: a{at + 1}" for at in range(links)), f'a{links}: "x"']
    return Grammar("\n".join(lines), is_schema=False)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("{"), "invalid"),
        (Grammar('{"type": "strin"}'), "strin"),
        (Grammar('{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Grammar('{"$ref": "http://example.com/schema"}'), "example.com"),
        (Grammar("[1]"), "object or boolean"),
        (Grammar("false"), "Unsatisfiable"),
        (Grammar('{"type": "string", "pattern": "(a"}'), "unclosed group"),
        (Grammar('{"x-guidance": {"lenient": true}, "not": {}}'), '"not"'),
        (Grammar('{"const": NaN}'), "NaN is not JSON"),
        (Grammar('{"const": "\ud83d"}'), "half a character"),
        (Grammar('{"$ref": "#"}'), "no answer can match it"),
        (Grammar.regex(r"[^\s\S]"), "no answer can match it"),
        (Grammar("start: other", is_schema=False), "other"),
        (Grammar('start: A "x"\nA[max_tokens=4]: /.*/', is_schema=False), "not supported"),
        # each of them would end, or fill, the process that reads it
        (chain(5_000), "nested too deeply"),
        (rules(8_000), "nested too deeply"),
        (Grammar('{"type": "integer", "multipleOf": 1000003}'), "takes more than"),
        (
            Grammar.json_schema(
                {"allOf": [{"pattern": f"^(a|b)*a(a|b){{{at}}}$"} for at in range(30, 60)]}
            ),
            "takes more than",
        ),
        (Grammar('{"enum": ["' + "a" * (1 << 20) + '"]}'), "1,048,576"),
        (Grammar('{"items":' * 10_000 + "{}" + "}" * 10_000), "invalid"),
    ],
)
def test_what_is_invalid_or_not_supported_is_refused(grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        grammar.check()
    assert len(str(caught.value)) < 500
