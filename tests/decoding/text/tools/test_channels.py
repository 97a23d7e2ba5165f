"""Answers in gpt-oss's format: the final channel is shown, as text and as it is generated."""

from __future__ import annotations

import pytest

from decoding.text.detokenizer import Detokenizer, detokenize_stream
from decoding.text.tools.channels import answer_text
from support.channels import MARKERS, make_tokenizer


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ("so 42", "so42"),
        ("<|channel|> final <|message|> 42 ! <|return|>", "42!"),
        (
            "<|channel|> analysis <|message|> so 42 <|end|> <|start|> assistant <|channel|> final "
            "<|message|> 42 <|return|>",
            "42",
        ),
        ("<|channel|> analysis <|message|> so final 42", ""),  # ended in the middle
        ("<|channel|> commentary to=tool <|message|> 42 <|end|>", ""),
        ("<|channel|> final json <|message|> 42 <|end|> <|start|> assistant so", "42"),
        ("<|channel|> final", ""),
        ("<|message|> 42", ""),
    ],
)
def test_the_final_channel_is_shown(answer: str, shown: str) -> None:
    tokenizer = make_tokenizer(MARKERS)
    tokens = tokenizer(answer)["input_ids"]
    assert answer_text(tokenizer, tokens) == shown
    assert "".join(detokenize_stream(tokenizer, tokens)) == shown


@pytest.mark.parametrize("unknown", [None, "!"])
@pytest.mark.parametrize("markers", [[], MARKERS[:2], MARKERS[1:]])
def test_other_tokenizers_have_no_channels(markers: list[str], unknown: str | None) -> None:
    tokenizer = make_tokenizer(markers, unknown)
    text = " ".join([*markers, "analysis so 42 !"])
    tokens = tokenizer(text)["input_ids"]
    shown = "analysisso42" if unknown == "!" else "analysisso42!"  # it is special
    assert answer_text(tokenizer, tokens) == shown
    assert "".join(detokenize_stream(tokenizer, tokens)) == shown


def test_all_text_is_shown_with_the_markers() -> None:
    tokenizer = make_tokenizer(MARKERS)
    answer = (
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>42"
    )
    shown = dict(zip(tokenizer.convert_tokens_to_ids(MARKERS[:4]), MARKERS[:4], strict=True))
    detokenizer = Detokenizer(tokenizer, shown)
    tokens = tokenizer(answer.replace("<|", " <|").replace("|>", "|> "))["input_ids"]
    assert "".join(detokenizer.feed(token) or "" for token in tokens) == answer
