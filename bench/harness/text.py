"""Long real texts: of files and folders, of PG-19 and NarrativeQA, or what every machine has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from decoding.app.batch.documents import find_documents
from decoding.models.loading import load_tokenizer
from offload.errors import TierForceError, one_line
from parallel.model.loading import resolve
from parallel.ranks.process_group import TensorParallelGroup

BUILT_IN = "pydoc_data.topics"  # the name of the text that is on every machine
# name on the hub, configuration, split, and where a row has its text and its name
HUB: dict[str, tuple[str, str | None, str, tuple[str, ...], str]] = {
    "pg19": ("emozilla/pg19-test", None, "test", ("text",), "short_book_title"),
    "narrativeqa": ("deepmind/narrativeqa", None, "test", ("document", "text"), "document"),
}


def tokenizer_of(model: str) -> Any:
    """Return the tokenizer of the model that a name stands for. Raises TierForceError."""
    return load_tokenizer(resolve(model, TensorParallelGroup()))


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


def documents(source: str | None, count: int, shortest: int) -> dict[str, str]:
    """Return up to `count` texts of at least `shortest` characters, by name.

    `source` is `pg19`, `narrativeqa`, a folder or a file; None is Python's language reference,
    begun at as many places. Raises TierForceError.
    """
    if source is None:
        return _from_python(count, shortest)
    texts = (
        _from_hub(source, count, shortest)
        if source in HUB
        else _from_disk(Path(source), count, shortest)
    )
    if not texts:
        raise TierForceError(f"--data {source}: no text there has {shortest:,} characters.")
    return texts


def _from_python(count: int, shortest: int) -> dict[str, str]:
    text, name = long_text(), "python-language-reference"
    if len(text) < shortest:
        raise TierForceError(
            f"{name} has {len(text):,} characters, fewer than {shortest:,}: name a folder with"
            " --data."
        )
    starts = [number * len(text) // count for number in range(count)]
    return {f"{name}-{at + 1}": text[start:] + text[:start] for at, start in enumerate(starts)}


def _from_disk(path: Path, count: int, shortest: int) -> dict[str, str]:
    texts = ((each.id, each.read()) for each in find_documents(path).documents)
    return dict(islice(((name, text) for name, text in texts if len(text) >= shortest), count))


def _from_hub(source: str, count: int, shortest: int) -> dict[str, str]:
    try:
        import datasets
    except ImportError as error:
        raise TierForceError(
            f"--data {source} needs the package datasets: pip install datasets, or name a folder."
        ) from error
    name, configuration, split, where, title = HUB[source]
    texts: dict[str, str] = {}
    try:
        for row in datasets.load_dataset(name, configuration, split=split, streaming=True):
            text: Any = row
            for key in where:
                text = text[key]
            if len(text) >= shortest:
                named = row[title]["id"] if isinstance(row[title], dict) else row[title]
                # NarrativeQA has a row a question
                texts.setdefault(str(named).replace("/", "-"), text)
            if len(texts) == count:
                break
    except Exception as error:  # no network, a set that moved, a column that is gone
        raise TierForceError(
            f"--data {source}: {name} cannot be had ({one_line(error)}); name a folder instead."
        ) from error
    return texts
