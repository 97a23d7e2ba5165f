"""Long real text: a file's, a folder's, or that of Python's language reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decoding.app.batch.documents import find_documents
from decoding.models.loading import load_tokenizer
from offload.errors import TierForceError
from parallel.model.loading import resolve
from parallel.ranks.process_group import Group

BUILT_IN = "pydoc_data.topics"  # the name of the text that is on every machine


def tokenizer_of(model: str) -> Any:
    """Return the tokenizer of the model that a name stands for. Raises TierForceError."""
    return load_tokenizer(resolve(model, Group()))


def long_text(path: Path | None = None) -> str:
    """Return the text of a file, of all files of a folder, or Python's language reference.

    Python 3.11 has 465 KB of it. Raises TierForceError.
    """
    if path is not None:
        try:
            return "\n\n".join(each.read() for each in find_documents(path).documents)
        except TierForceError as error:  # which is worded for another command
            raise TierForceError(str(error).replace("--input", "--text", 1)) from error
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def text_tokens(tokenizer: Any, path: Path | None = None) -> list[int]:
    """Return all tokens of that text."""
    tokens: list[int] = tokenizer(long_text(path)).input_ids
    return tokens


def prompt_tokens(tokenizer: Any, tokens: int, path: Path | None = None) -> list[int]:
    """Return the first `tokens` tokens of that text. Raises TierForceError when it has fewer."""
    every = text_tokens(tokenizer, path)
    if len(every) < tokens:
        raise TierForceError(
            f"the text has {len(every)} tokens, fewer than the {tokens} asked for: use a longer "
            "--text."
        )
    return every[:tokens]


def prompts(tokens: Sequence[int], context: int, count: int, new: int) -> list[list[int]]:
    """Return `count` stretches of `context` tokens, spread evenly over the text.

    Behind each there are `new` tokens more. Raises TierForceError when the text is too short.
    """
    spare = len(tokens) - context - new
    if spare < count - 1:
        raise TierForceError(
            f"the text has {len(tokens)} tokens, too few for {count} prompts of {context}: use a "
            "longer --text."
        )
    step = spare // max(1, count - 1)
    return [list(tokens[index * step : index * step + context]) for index in range(count)]
