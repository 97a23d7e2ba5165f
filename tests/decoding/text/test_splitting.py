"""The spans of a long text cover it, fit, are nearly equal, and end in good places."""

from __future__ import annotations

import random
from typing import Any

import pytest
from transformers import AutoTokenizer

from decoding.text.encoding import plain_tokens
from decoding.text.splitting import Span, split_text
from offload.errors import InvalidRequestError
from support.commands import TARGET

SENTENCE = "It was the best of times, it was the worst of times. "
PARAGRAPH = SENTENCE * 4 + "\n\n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET)


def check(tokenizer: Any, text: str, room: int) -> list[Span]:
    """Split a text; fail unless the spans cover it, fit and are not empty."""
    spans = split_text(tokenizer, text, room, lambda part: size(tokenizer, part) <= room)
    assert "".join(text[span.start : span.end] for span in spans) == text
    assert [span.end for span in spans[:-1]] == [span.start for span in spans[1:]]
    assert all(span.start < span.end for span in spans)
    assert all(size(tokenizer, text[span.start : span.end]) <= room for span in spans)
    return spans


def size(tokenizer: Any, text: str) -> int:
    return len(plain_tokens(tokenizer, text))


def random_text(characters: str, count: int) -> str:
    rng = random.Random(count)
    return "".join(rng.choice(characters) for _ in range(count))


STRINGS = {
    "prose": PARAGRAPH * 40,
    "one line": SENTENCE * 200,
    "one word": "a" * 5000,
    "spaces": " " * 4000 + "\n" * 4000 + "\t" * 100,
    "emoji": "\U0001f9d1\u200d\U0001f680 " * 300,
    "exclamations": "!?" * 3000,
    "noise": random_text("ab .!?\n\r\t#\U0001f600\u3002\u7b2c", 6000),
    "Chinese": "\u7b2c\u4e00\u7ae0\n" + "\u5929\u5730\u7384\u9ec4\u3002" * 400,
}


@pytest.mark.parametrize("room", [16, 100, 700])
@pytest.mark.parametrize("name", STRINGS)
def test_spans_cover_a_text_and_fit(name: str, room: int, tokenizer: Any) -> None:
    spans = check(tokenizer, STRINGS[name], room)
    assert len(spans) <= 2 * (size(tokenizer, STRINGS[name]) // (room - room // 4) + 1)


@pytest.mark.parametrize("piece", ["\n", "\n\n\n    ", "\n \n\t", "\n\n# ", "\n\npart iv", '."'])
def test_hostile_text_takes_linear_time(piece: str, tokenizer: Any) -> None:
    """Quadratic time would be minutes."""
    text = piece * (400_000 // len(piece))
    spans = split_text(tokenizer, text, 60_000)
    assert spans[-1].end == len(text)


@pytest.mark.parametrize("heading", ["# {}", "CHAPTER {}\n\nThe Period", "\u7b2c{}\u7ae0", "{}"])
def test_spans_begin_at_chapters_and_are_nearly_equal(heading: str, tokenizer: Any) -> None:
    """A number alone counts by the blank lines before it."""
    rng = random.Random(0)
    chapters = [
        f"{heading.format(number)}\n\n{PARAGRAPH * rng.randint(3, 5)}\n\n\n" for number in range(60)
    ]
    text = "".join(chapters)
    spans = check(tokenizer, text, 30 * size(tokenizer, PARAGRAPH))
    begins = [text[span.start :].partition("\n")[0] for span in spans]
    assert all(not line.startswith("It was") for line in begins), begins
    assert max(span.tokens for span in spans) <= 1.5 * min(span.tokens for span in spans)


def test_spans_end_with_paragraphs_or_else_sentences(tokenizer: Any) -> None:
    paragraphs = PARAGRAPH * 60
    for span in check(tokenizer, paragraphs, 12 * size(tokenizer, PARAGRAPH)):
        assert paragraphs[span.start : span.end].endswith("\n\n")
    sentences = SENTENCE * 200
    for span in check(tokenizer, sentences, 40 * size(tokenizer, SENTENCE)):
        assert sentences[span.start : span.end].endswith("times. ")


def test_a_sentence_is_no_heading(tokenizer: Any) -> None:
    """Chapters are within a fifth of a span, these paragraphs within a tenth."""
    line = "Part of it was the best of times,\nit was the worst of times.\n\n"
    text = "".join(f"{PARAGRAPH * 9}{line}" for _ in range(12))
    room = 12 * size(tokenizer, PARAGRAPH)
    begins = [text[span.start :][:8] for span in check(tokenizer, text, room)]
    assert begins.count("Part of ") < len(begins) // 2


def test_no_span_ends_with_a_heading(tokenizer: Any) -> None:
    text = "".join(f"The title of section {n}\n\n{PARAGRAPH}" for n in range(60))
    for span in check(tokenizer, text, 10 * size(tokenizer, PARAGRAPH))[:-1]:
        assert text[: span.end].endswith("times. \n\n")


def test_a_short_text_is_one_span(tokenizer: Any) -> None:
    tokens = size(tokenizer, SENTENCE)
    assert split_text(tokenizer, SENTENCE, 1000) == [Span(0, len(SENTENCE), tokens)]


@pytest.mark.parametrize("room", [-5, 0, 1])
def test_too_little_room_is_an_error(room: int, tokenizer: Any) -> None:
    with pytest.raises(InvalidRequestError, match="use a longer `context`"):
        split_text(tokenizer, SENTENCE * 10, room, lambda part: size(tokenizer, part) <= room - 1)


def test_a_lone_surrogate_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(InvalidRequestError, match="half a character"):
        split_text(tokenizer, "a\ud800b" * 100, 20)
