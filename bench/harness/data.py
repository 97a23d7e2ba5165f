"""Long real documents: of PG-19, of NarrativeQA, of a folder, or what is on every machine."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from bench.harness.text import long_text
from decoding.app.batch.documents import find_documents
from offload.errors import TierForceError, one_line

# name on the hub, configuration, split, and where a row has its text and its name
HUB: dict[str, tuple[str, str | None, str, tuple[str, ...], str]] = {
    "pg19": ("emozilla/pg19-test", None, "test", ("text",), "short_book_title"),
    "narrativeqa": ("deepmind/narrativeqa", None, "test", ("document", "text"), "document"),
}


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
                texts.setdefault(_title(row[title]), text)  # NarrativeQA has a row a question
            if len(texts) == count:
                break
    except Exception as error:  # no network, a set that moved, a column that is gone
        raise TierForceError(
            f"--data {source}: {name} cannot be had ({one_line(error)}); name a folder instead."
        ) from error
    return texts


def _title(value: Any) -> str:
    return str(value["id"] if isinstance(value, dict) else value).replace("/", "-")
