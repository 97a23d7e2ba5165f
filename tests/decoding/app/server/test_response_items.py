"""The items of a response, and the events of a stream that has them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from decoding.app.server.formats.response_items import OutputItems
from decoding.app.server.worker.jobs import TextDelta
from decoding.text.tools.channel_parser import ChannelParser
from decoding.text.tools.channels import CHANNEL, END, MESSAGE, PLACEHOLDERS
from decoding.text.tools.forms import HERMES
from decoding.text.tools.parser import AnswerParser, ToolCallParser

FIRST = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
SECOND = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
FUNCTIONS: dict[str, Any] = {"f": {}, "g": {}}


def items_of(parts: list[str], is_complete: bool = True, **options: Any) -> tuple[Any, list[Any]]:
    """Return the items of an answer that arrives in parts, and the events of its stream."""
    return output_of(ToolCallParser(HERMES, FUNCTIONS, **options), parts, is_complete)


def output_of(
    parser: AnswerParser, parts: list[str], is_complete: bool = True
) -> tuple[Any, list[Any]]:
    items = OutputItems(parser)
    events = items.begin()
    for part in parts:
        events += items.add(TextDelta(part))
    events += items.end(is_complete)
    return items.as_json(), events


def from_events(events: list[Any]) -> list[dict[str, Any]]:
    """Return the items that a client makes of a stream, of which the order is checked."""
    done: list[dict[str, Any]] = []
    content = ""
    for name, fields in events:
        assert fields["output_index"] == len(done)
        if name == "output_item.added":
            assert fields["item"]["status"] == "in_progress"
            item, content = fields["item"], ""
        elif name.endswith(".delta"):
            assert fields["item_id"] == item["id"]
            content += fields["delta"]
        elif name in ("output_text.done", "function_call_arguments.done"):
            assert content == fields["text" if name == "output_text.done" else "arguments"]
        elif name == "output_item.done":
            assert fields["item"]["id"] == item["id"]
            done.append(fields["item"])
    return done


def shown(items: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return what items have besides their ids."""
    return [
        (item["status"], item["content"][0]["text"])
        if item["type"] == "message"
        else (item["status"], item["name"], item["arguments"])
        for item in items
    ]


ANSWERS = [
    ("I see.", [("completed", "I see.")]),
    ("", [("completed", "")]),
    (FIRST, [("completed", "f", '{"a": 1}')]),
    (f"\n{FIRST}\n{SECOND}\n", [("completed", "f", '{"a": 1}'), ("completed", "g", "{}")]),
    (
        f"I look. {FIRST}Then {SECOND} Done.",
        [
            ("completed", "I look."),
            ("completed", "f", '{"a": 1}'),
            ("completed", "Then"),
            ("completed", "g", "{}"),
            ("completed", "Done."),
        ],
    ),
]


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
def test_items_are_in_the_order_of_the_answer(answer: str, expected: list[Any]) -> None:
    rng = random.Random(0)
    found, _ = items_of([answer])
    assert shown(found) == expected
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(answer) + 1), k=rng.randrange(8)))
        parts = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
        whole, events = items_of(parts)
        assert shown(whole) == shown(found)
        assert from_events(events) == whole
        assert len({item["id"] for item in whole}) == len(whole)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (FIRST[:-17], [("incomplete", "f", '{"a"')]),
        (FIRST, [("completed", "f", '{"a": 1}')]),
        (f"I look.{FIRST}{SECOND[:-14]}", [("completed", "f"), ("incomplete", "g", "{")]),
        ("I lo", [("incomplete", "I lo")]),
    ],
)
def test_only_the_last_item_may_be_incomplete(answer: str, expected: list[Any]) -> None:
    found, events = items_of([answer], is_complete=False)
    last = shown(found)[-len(expected) :]
    assert [each[: len(own)] for each, own in zip(last, expected, strict=True)] == expected
    assert from_events(events) == found


@pytest.mark.parametrize("ends", [(2, 7), (7, 2), (2, 2)])
def test_calls_that_the_model_did_not_finish_are_incomplete(ends: tuple[int, int]) -> None:
    """In gpt-oss's format others may follow them."""
    channel, message, end = (PLACEHOLDERS[each] for each in (CHANNEL, MESSAGE, END))
    cut = [f'{{"a":{number}}}'[:size] for number, size in enumerate(ends)]
    calls = [f"{channel}commentary to=functions.f{message}{text}{end}" for text in cut]
    parser = ChannelParser(FUNCTIONS)
    found, events = output_of(parser, [*calls, f"{channel}final{message}So."])
    statuses = ["completed" if size == 7 else "incomplete" for size in ends]
    assert shown(found) == [
        *((status, "f", text) for status, text in zip(statuses, cut, strict=True)),
        ("completed", "So."),
    ]
    assert from_events(events) == found
    assert parser.has_calls == ("completed" in statuses)


def test_calls_beyond_the_limit_are_dropped() -> None:
    found, events = items_of([FIRST, SECOND], max_calls=1)
    assert shown(found) == [("completed", "f", '{"a": 1}')]
    assert from_events(events) == found
