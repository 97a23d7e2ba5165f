"""Answers in gpt-oss's format: the final channel is shown, as text and as it is generated."""

from __future__ import annotations

import pytest

from decoding.text.channels import answer_text
from decoding.text.detokenizer import detokenize_stream
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
