"""Long real text that is on every machine: Python's own language reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offload.errors import TierForceError

BUILT_IN = "pydoc_data.topics"  # the name of the text that is on every machine
DEMO = Path(__file__).parents[2] / "demo"  # the built-in pair


def long_text(path: Path | None = None) -> str:
    """Return the text of a file, or Python's language reference (465 KB in Python 3.11)."""
    if path is not None:
        return path.read_text(encoding="utf-8")
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def text_tokens(tokenizer, path: Path | None = None) -> list[int]:
    """Return all tokens of that text."""
    return tokenizer(long_text(path)).input_ids


def prompt_tokens(tokenizer, tokens: int, path: Path | None = None) -> list[int]:
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
