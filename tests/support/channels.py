"""A small tokenizer of words, with gpt-oss's markers of channels."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["x", "assistant", "analysis", "final", "commentary", "to=tool", "json", "so", "42", "!"]
MARKERS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]


def make_tokenizer(markers: list[str], unknown: str | None = None) -> Any:
    """Return the tokenizer with these markers, and a token for what is unknown."""
    vocab = {word: index for index, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="x"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    words.add_special_tokens(markers)
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token=unknown)
