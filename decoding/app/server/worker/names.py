"""Names of prompts in the prompt cache on disk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from decoding.app.terminal.streams import printable

_ROLES = ("system", "user", "assistant")  # a chat template may write one before a message
_MAX_TOKENS = 48  # decoded tokens
_MAX_CHARACTERS = 60


def prompt_name(tokenizer: Any, prompt: Sequence[int]) -> str:
    """Return the first words of a prompt's longest message, without control characters.

    A message is a run of tokens between special tokens. The longest is the document, if any.
    """
    special = {token for token, each in tokenizer.added_tokens_decoder.items() if each.special}
    runs = [
        list(run) for is_special, run in groupby(prompt, special.__contains__) if not is_special
    ]
    longest = max(runs, key=len, default=[])
    text = tokenizer.decode(longest[:_MAX_TOKENS]).strip()
    role, _, message = text.partition("\n")
    words = " ".join((message if message and role.strip() in _ROLES else text).split())
    return printable(words[:_MAX_CHARACTERS])
