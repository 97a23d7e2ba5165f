"""What prompts of requests are called where they are kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from decoding.app.terminal.streams import printable

_ROLES = ("system", "user", "assistant")  # what a chat template may write before a message
_MAX_TOKENS = 48  # that are decoded
_MAX_CHARACTERS = 60


def name_of(tokenizer: Any, prompt: Sequence[int]) -> str:
    """Return the first words of the longest message of a prompt, fit for a terminal.

    Messages are what stands between special tokens. The longest is the document, if there is one.
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
