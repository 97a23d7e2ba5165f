"""`prompt-cache list` and `prompt-cache drop`: the prompts stored on disk."""

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

_WIDTH = 160  # columns, if standard output is not a terminal


def show(folder: str, as_json: bool) -> None:
    """List the prompts in a folder, most recently used first. Raises TierForceError."""
    prompts = _open_cache(folder).prompts()[::-1]
    if as_json:
        json.dump([_as_dict(prompt) for prompt in prompts], sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    if prompts:
        width = None if sys.stdout.isatty() else _WIDTH
        console = Console(file=sys.stdout, highlight=False, markup=False, width=width)
        console.print(_table(prompts))
    say(f"{_total(prompts)}, in {folder}")


def drop(folder: str, ids: Sequence[str], everything: bool) -> None:
    """Remove prompts from a folder. Raises TierForceError for an id it does not have."""
    if everything == bool(ids):
        raise TierForceError("name the prompts to drop by their ids, or drop all with --all.")
    cache = _open_cache(folder)
    cache.warn = say
    cache.create()
    cache.collect_garbage()
    prompts = {prompt.id: prompt for prompt in cache.prompts()}
    if missing := [id for id in ids if id not in prompts]:
        raise TierForceError(
            f"{folder} has no prompt with the id {missing[0]}: `tierforce prompt-cache list "
            f"{folder}` lists the ids."
        )
    dropped = [prompts[id] for id in dict.fromkeys(ids)] if ids else list(prompts.values())
    for prompt in dropped:
        try:
            cache.drop(prompt)
        except OSError as error:
            raise TierForceError(f"{prompt.folder} cannot be removed: {error.strerror}.") from error
    say(f"dropped {_total(dropped)}")


def _table(prompts: Sequence[CachedPrompt]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("id", "name", "model", "ranks", "tokens", "GB", "last used"):
        is_number = heading in ("ranks", "tokens", "GB")
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    for prompt in prompts:
        manifest = prompt.manifest
        names = printable(manifest.name), printable(manifest.model)
        numbers = str(manifest.ranks), f"{manifest.tokens:,}", f"{manifest.nbytes / 1e9:.2f}"
        table.add_row(prompt.id, *names, *numbers, _last_used(prompt))
    return table


def _total(prompts: Sequence[CachedPrompt]) -> str:
    total = sum(prompt.manifest.nbytes for prompt in prompts) / 1e9
    return f"{len(prompts)} prompt{'' if len(prompts) == 1 else 's'}, {total:.2f} GB"


def _open_cache(folder: str) -> PromptCache:
    if not folder or not Path(folder).is_dir():
        raise TierForceError(f"{folder!r} is not a folder: name one used as --prompt-cache.")
    return PromptCache(Path(folder))


def _last_used(prompt: CachedPrompt) -> str:
    try:
        used = datetime.fromtimestamp(prompt.used, timezone.utc)
    except (ValueError, OverflowError, OSError):  # a damaged time
        return "-"
    return used.strftime("%Y-%m-%d %H:%M UTC")


def _as_dict(prompt: CachedPrompt) -> dict[str, str | int]:
    manifest = prompt.manifest
    return {
        "id": prompt.id,
        "name": manifest.name,
        "model": manifest.model,
        "ranks": manifest.ranks,
        "tokens": manifest.tokens,
        "bytes": manifest.nbytes,
        "saved": manifest.saved,
        "used": _last_used(prompt),
    }
