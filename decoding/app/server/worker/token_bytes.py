"""The bytes of single tokens, as they are reported with log-probabilities."""

from __future__ import annotations

import re
from functools import cache, cached_property
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from decoding.text.encoding import plain_tokens

_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token for a byte, in SentencePiece's vocabularies
_PART = "\ufffd"  # decoded part of a character


class TokenBytes:
    """The bytes of tokens, on the thread that uses the tokenizer."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.bytes_of = cache(self._bytes_of)

    def _bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token contributes within a text."""
        # decoded after another token, since a token at the beginning may lose its blank
        before = self._decode(self._anchor)
        text = self._decode([*self._anchor, token]).removeprefix(before)
        if _PART not in text:
            return text.encode()
        name = self._tokenizer.convert_ids_to_tokens(token)
        if byte := _BYTE.fullmatch(name):
            return bytes.fromhex(byte[1])
        if all(letter in self._letters for letter in name):
            return bytes(self._letters[letter] for letter in name)
        return text.encode()

    @cached_property
    def _letters(self) -> dict[str, int]:
        """Return the byte of each letter in a byte-level vocabulary (GPT-2's)."""
        return {letter: byte for byte, letter in bytes_to_unicode().items()}

    @cached_property
    def _anchor(self) -> list[int]:
        return plain_tokens(self._tokenizer, "a")[-1:]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
