"""Answers in gpt-oss's format: the final channel is shown, as text and as it is generated."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decoding.text.channels import answer_text
from decoding.text.detokenizer import detokenize_stream

WORDS = ["x", "assistant", "analysis", "final", "commentary", "to=tool", "json", "so", "42", "!"]
MARKERS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]


def make_tokenizer(markers: list[str], unknown: str | None = None) -> Any:
    vocab = {word: index for index, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="x"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    words.add_special_tokens(markers)
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token=unknown)


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
    tokens = tokenizer("analysis so 42")["input_ids"]
    assert answer_text(tokenizer, tokens) == "analysisso42"
    assert "".join(detokenize_stream(tokenizer, tokens)) == "analysisso42"
