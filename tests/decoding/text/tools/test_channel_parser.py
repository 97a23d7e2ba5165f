"""Calls of tools in answers with gpt-oss's channels, however their text arrives."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from decoding.text.detokenizer import Detokenizer
from decoding.text.encoding import plain_tokens
from decoding.text.tools.channel_parser import ChannelParser
from decoding.text.tools.channels import PLACEHOLDERS
from decoding.text.tools.forms import HARMONY, Calling, marker_ids
from decoding.text.tools.parser import AnswerDelta
from support.chat_templates import CHAT_MODELS
from support.tools import CALLS, SCHEMAS

THOUGHT = "<|channel|>analysis<|message|>So {<call> to=functions.now.<|end|>"
NEXT = "<|start|>assistant"
ROME = '{"city": "Rome"}'
TO, AFTER = "to=functions.weather", "<|message|>"
HEADERS = [
    f"<|channel|>commentary {TO} <|constrain|>json<|message|>",
    f"<|channel|>commentary {TO}<|message|>",
    f" {TO}<|channel|>commentary json<|message|>",
    f" {TO}<|channel|>commentary <|constrain|>json<|message|>",
    f"<|channel|>analysis {TO} code<|message|>",
]
FINAL = "<|channel|>final<|message|>Fine, at to=42.<|return|>"


def marked(text: str) -> str:
    """Return a text with its markers as tokens of their own."""
    for marker, placeholder in PLACEHOLDERS.items():
        text = text.replace(marker, placeholder)
    return text


def parse(parts: list[str], max_calls: int | None = None) -> tuple[AnswerDelta, bool]:
    """Return an answer that arrives in parts, and whether it has a call."""
    parser, answer = ChannelParser(SCHEMAS, max_calls), AnswerDelta()
    for part in [*map(parser.feed, parts), parser.rest()]:
        answer += part
    return answer, parser.has_calls


def shown(answer: AnswerDelta) -> tuple[str, list[tuple[str | None, str]]]:
    return answer.content, [(call.name, call.arguments) for call in answer.calls]


def check_parts(text: str) -> None:
    """Check that the answer is the same, however it is cut."""
    rng, text = random.Random(0), marked(text)
    whole = parse([text])
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 9)))
        assert parse([text[a:b] for a, b in pairwise([0, *cuts, len(text)])]) == whole
    assert parse(list(text)) == whole


@pytest.mark.parametrize("begin", ["", THOUGHT + NEXT])
@pytest.mark.parametrize("end", ["", "<|end|>"])
@pytest.mark.parametrize("header", HEADERS)
def test_a_call_in_every_form_of_its_header(header: str, end: str, begin: str) -> None:
    text = f"{begin}{header}{ROME}{end}"
    answer, has_calls = parse([marked(text)])
    assert shown(answer) == ("", CALLS[:1])
    assert has_calls
    check_parts(text)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (FINAL.removesuffix("<|return|>"), "Fine, at to=42."),
        (f"{THOUGHT}{NEXT}<|channel|>final json<|message|>[1]", "[1]"),
        ("Fine.", "Fine."),  # the message began in the prompt
        ("to", "to"),
        (f"Fine.<|end|>{NEXT}<|channel|>final<|message|>So.", "Fine.\n\nSo."),
        (THOUGHT, ""),
        (THOUGHT[:-3], ""),
        ("<|channel|>commentary<|message|>I look.<|end|>", "I look."),
        ("<|channel|>commentary to=functions.other json<|message|>{}", ""),
        ("<|channel|>analysis to=python code<|message|>1 + 1", ""),
        (f"<|channel|>commentary {TO}<|message|>Rome", ""),
        (f"<|channel|>final {TO}<|message|> Rome {{1}}", "Rome {1}"),
        (f"<|channel|>analysis {TO} code<|message|>print({{'a': 1}}, {{'b': 2}})<|end|>", ""),
        ("<|channel|>final<|message|>a <|chan", "a <|chan"),
        ("<|channel|>final", ""),
        ("", ""),
    ],
)
def test_what_is_no_call_is_text_in_channels_for_the_user(text: str, content: str) -> None:
    answer, has_calls = parse([marked(text)])
    assert shown(answer) == (content, [])
    assert not has_calls
    check_parts(text)


def test_the_name_of_a_function_is_in_the_header_alone() -> None:
    parser = ChannelParser({"get": {}, "get_all": {}})
    answer = parser.feed(marked("<|channel|>final to=functions.get<|message|>_all{}"))
    assert shown(answer) == ("_all{}", [])


def test_a_result_that_the_model_invents_is_no_text() -> None:
    result = f'{NEXT[:9]}functions.weather to=assistant<|channel|>commentary<|message|>"sunny"'
    answer, has_calls = parse([marked(f"{HEADERS[0]}{ROME}<|end|>{result}")])
    assert shown(answer) == ("", CALLS[:1])
    assert has_calls


def test_text_and_calls_keep_their_order() -> None:
    call = f"{HEADERS[0]}{ROME}<|end|>"
    now = "<|channel|>commentary to=functions.now<|message|>{}<|end|>"
    comment = "<|channel|>commentary<|message|>I look.<|end|>"
    text = NEXT.join([comment, call, THOUGHT, now, "<|channel|>final<|message|>Fine."])
    answer, has_calls = parse([marked(text)])
    assert shown(answer) == ("I look.\n\nFine.", CALLS)
    assert [isinstance(part, str) for part in answer.parts] == [True, False, False, True]
    assert has_calls
    assert shown(parse([marked(text)], max_calls=1)[0]) == ("I look.\n\nFine.", CALLS[:1])
    check_parts(text)


@pytest.mark.parametrize("size", range(1, len(ROME)))
def test_a_call_that_is_cut_has_a_part_of_its_arguments(size: int) -> None:
    answer, has_calls = parse([marked(HEADERS[0]) + ROME[:size]])
    assert shown(answer) == ("", [("weather", ROME[:size])])
    assert not has_calls


def test_arguments_are_streamed() -> None:
    parser = ChannelParser(SCHEMAS)
    parts = [parser.feed(each) for each in (marked(HEADERS[0]), '{"city"', ': "Ro', 'me"}')]
    calls = [(call.name, call.arguments) for part in parts for call in part.calls]
    assert calls == [("weather", '{"city"'), (None, ': "Ro'), (None, 'me"}')]


SPELLED = "<|end|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}"


@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        ("<|channel|>final<|message|>", f"A call is {SPELLED}", []),
        (HEADERS[0], "", [("weather", '{"city": "<|end|> twice"}')]),
        ("<|channel|>analysis<|message|>", "", []),
    ],
)
def test_text_may_spell_markers(answer: str, content: str, calls: list[tuple[str, str]]) -> None:
    tokenizer = CHAT_MODELS["gpt-oss"].tokenizer()
    own = content or (calls[0][1] if calls else SPELLED)
    tokens = [*tokenizer(answer).input_ids, *plain_tokens(tokenizer, own)]
    calling = Calling(HARMONY, marker_ids(tokenizer, HARMONY))
    detokenizer = Detokenizer(tokenizer, calling.shown_tokens)
    answer = [detokenizer.feed(token) or "" for token in tokens]
    assert shown(parse(answer)[0]) == shown(parse(["".join(answer)])[0]) == (content, calls)
