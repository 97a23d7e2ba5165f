"""`keep list` and `keep drop`: what was read and stays on disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.table import Table

from decoding.app.terminal.streams import printable, say
from decoding.prefix_cache.store import CachedPrompt, PromptCache
from offload.errors import TierForceError

_WIDTH = 160  # columns, where nobody looks on


def show(folder: str, as_json: bool) -> None:
    """Print what a folder keeps, the most recently used first. Raises TierForceError."""
    prompts = _opened(folder).prompts()[::-1]
    if as_json:
        json.dump([_said(each) for each in prompts], sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    if prompts:
        width = None if sys.stdout.isatty() else _WIDTH
        console = Console(file=sys.stdout, highlight=False, markup=False, width=width)
        console.print(_table(prompts))
    say(f"{_amount(prompts)}, in {folder}")


def drop(folder: str, ids: Sequence[str], everything: bool) -> None:
    """Remove texts from a folder. Raises TierForceError for one that is not there."""
    if everything == bool(ids):
        raise TierForceError("say which texts are to go, by their ids, or all of them by --all.")
    cache = _opened(folder)
    cache.warn = say
    cache.create()
    cache.collect_garbage()
    prompts = {each.id: each for each in cache.prompts()}
    if missing := [each for each in ids if each not in prompts]:
        raise TierForceError(
            f"{folder} has no prompt with the id {missing[0]}: `tierforce prompt-cache list {folder}` "
            "lists the ids."
        )
    gone = [prompts[each] for each in dict.fromkeys(ids)] if ids else list(prompts.values())
    for each in gone:
        try:
            cache.drop(each)
        except OSError as error:
            raise TierForceError(f"{each.folder} cannot be removed: {error.strerror}.") from error
    say(f"dropped {_amount(gone)}")


def _table(prompts: Sequence[CachedPrompt]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("id", "name", "model", "ranks", "tokens", "GB", "last used"):
        is_number = heading in ("ranks", "tokens", "GB")
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    for each in prompts:
        said = each.manifest
        names = printable(said.name), printable(said.model)
        numbers = str(said.ranks), f"{said.tokens:,}", f"{said.nbytes / 1e9:.2f}"
        table.add_row(each.id, *names, *numbers, _used(each))
    return table


def _amount(prompts: Sequence[CachedPrompt]) -> str:
    total = sum(each.manifest.nbytes for each in prompts) / 1e9
    return f"{len(prompts)} text{'' if len(prompts) == 1 else 's'}, {total:.2f} GB"


def _opened(folder: str) -> PromptCache:
    if not folder or not Path(folder).is_dir():
        raise TierForceError(f"{folder!r} is no folder: name one that --prompt-cache was given.")
    return PromptCache(Path(folder))


def _used(kept: CachedPrompt) -> str:
    try:
        used = datetime.fromtimestamp(kept.used, timezone.utc)
    except (ValueError, OverflowError, OSError):  # a time that no calendar has
        return "-"
    return used.strftime("%Y-%m-%d %H:%M UTC")


def _said(kept: CachedPrompt) -> dict[str, str | int]:
    said = kept.manifest
    return {
        "id": kept.id,
        "name": said.name,
        "model": said.model,
        "ranks": said.ranks,
        "tokens": said.tokens,
        "bytes": said.nbytes,
        "saved": said.saved,
        "used": _used(kept),
    }
