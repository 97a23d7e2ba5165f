"""What single tokens stand for, as a client is told who asks for probabilities."""

from __future__ import annotations

import re
from functools import cache, cached_property
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from decoding.text.encoding import plain_tokens

_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token for a byte, in SentencePiece's vocabularies
_PART = "\ufffd"  # what a part of a character decodes to


class TokenTexts:
    """The bytes of tokens, on the thread that uses the tokenizer."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.bytes_of = cache(self._bytes_of)

    def _bytes_of(self, token: int) -> bytes:
        """Return what a token adds to a text that it stands in."""
        # behind another token, for what begins a text may lose its blank
        before = self._decoded(self._anchor)
        text = self._decoded([*self._anchor, token]).removeprefix(before)
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
        """Return the bytes that the letters of a byte-level vocabulary stand for (GPT-2's)."""
        return {letter: byte for byte, letter in bytes_to_unicode().items()}

    @cached_property
    def _anchor(self) -> list[int]:
        return plain_tokens(self._tokenizer, "a")[-1:]

    def _decoded(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
