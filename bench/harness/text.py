"""Long real documents: files, folders, PG-19, NarrativeQA, or the Python installation's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from decoding.app.documents.listing import find_documents
from decoding.models.loading import load_tokenizer
from offload.errors import TierForceError, one_line
from parallel.model.loading import resolve
from parallel.ranks.process_group import TensorParallelGroup

BUILT_IN = "pydoc_data.topics"  # name of the text that every Python installation has
# data set: name on the hub, configuration, split, and a row's columns of text and title
HUB: dict[str, tuple[str, str | None, str, tuple[str, ...], str]] = {
    "pg19": ("emozilla/pg19-test", None, "test", ("text",), "short_book_title"),
    "narrativeqa": ("deepmind/narrativeqa", None, "test", ("document", "text"), "document"),
}


def tokenizer_of(model: str) -> Any:
    """Return the tokenizer of a model by name. Raises TierForceError."""
    return load_tokenizer(resolve(model, TensorParallelGroup()))


def long_text(path: Path | None = None) -> str:
    """Return the text of a file, of all files of a folder, or Python's language reference.

    Python 3.11 has 465 KB of it. Raises TierForceError.
    """
    if path is not None:
        return "\n\n".join(_documents_at(path).values())
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def books(paths: Sequence[Path] | None) -> dict[str, str]:
    """Return the text of each file, and of each file of a folder, by name.

    Without paths, of Python's language reference. Raises TierForceError.
    """
    if not paths:
        return {BUILT_IN: long_text()}
    found: dict[str, str] = {}
    for path in paths:
        for name, text in _documents_at(path).items():
            if name in found:
                raise TierForceError(f"--text {path}: another file is called {name}: rename one.")
            found[name] = text
    return found


def _documents_at(path: Path) -> dict[str, str]:
    """Return the text of a file, or of all files of a folder, by name. Raises TierForceError."""
    try:
        return {document.id: document.read().text for document in find_documents(path).documents}
    except TierForceError as error:  # worded for `summarize`
        raise TierForceError(str(error).replace("--input", "--text", 1)) from error


def text_tokens(tokenizer: Any, path: Path | None = None) -> list[int]:
    """Return all tokens of `long_text(path)`."""
    tokens: list[int] = tokenizer(long_text(path)).input_ids
    return tokens


def prompt_tokens(tokenizer: Any, tokens: int, path: Path | None = None) -> list[int]:
    """Return the first tokens of `long_text(path)`. Raises TierForceError if there are fewer."""
    available = text_tokens(tokenizer, path)
    if len(available) < tokens:
        raise TierForceError(
            f"the text has {len(available)} tokens, fewer than the required {tokens}: use a longer "
            "--text."
        )
    return available[:tokens]


def select_prompts(
    tokens: Sequence[int], context: int, count: int, new_tokens: int
) -> list[list[int]]:
    """Return `count` prompts of `context` tokens, spread evenly over the text.

    Each is followed by at least `new_tokens` tokens. Raises TierForceError if the text is too
    short.
    """
    spare = len(tokens) - context - new_tokens
    if spare < count - 1:
        raise TierForceError(
            f"the text has {len(tokens)} tokens, too few for {count} prompts of {context}: use a "
            "longer --text."
        )
    step = spare // max(1, count - 1)
    return [list(tokens[index * step : index * step + context]) for index in range(count)]


def documents(source: str | None, count: int, min_characters: int) -> dict[str, str]:
    """Return up to `count` documents of at least `min_characters` characters, by name.

    `source` is `pg19`, `narrativeqa`, a folder or a file; None is Python's language reference,
    rotated to `count` starting points. Raises TierForceError.
    """
    if source is None:
        return _from_python(count, min_characters)
    found = (
        _from_hub(source, count, min_characters)
        if source in HUB
        else _from_disk(Path(source), count, min_characters)
    )
    if not found:
        raise TierForceError(f"--data {source}: no document has {min_characters:,} characters.")
    return found


def _from_python(count: int, min_characters: int) -> dict[str, str]:
    text, name = long_text(), "python-language-reference"
    if len(text) < min_characters:
        raise TierForceError(
            f"{name} has {len(text):,} characters, fewer than {min_characters:,}: name a folder "
            "with --data."
        )
    starts = [number * len(text) // count for number in range(count)]
    return {f"{name}-{at + 1}": text[start:] + text[:start] for at, start in enumerate(starts)}


def _from_disk(path: Path, count: int, min_characters: int) -> dict[str, str]:
    found = ((document.id, document.read().text) for document in find_documents(path).documents)
    long = ((name, text) for name, text in found if len(text) >= min_characters)
    return dict(islice(long, count))


def _from_hub(source: str, count: int, min_characters: int) -> dict[str, str]:
    try:
        import datasets
    except ImportError as error:
        raise TierForceError(
            f"--data {source} needs the package datasets: pip install datasets, or name a folder."
        ) from error
    name, configuration, split, column, title = HUB[source]
    found: dict[str, str] = {}
    try:
        for row in datasets.load_dataset(name, configuration, split=split, streaming=True):
            text: Any = row
            for key in column:
                text = text[key]
            if len(text) >= min_characters:
                named = row[title]["id"] if isinstance(row[title], dict) else row[title]
                # NarrativeQA has one row per question
                found.setdefault(str(named).replace("/", "-"), text)
            if len(found) == count:
                break
    except Exception as error:  # no network, a renamed data set or column
        raise TierForceError(
            f"--data {source}: {name} cannot be loaded ({one_line(error)}); name a folder instead."
        ) from error
    return found
