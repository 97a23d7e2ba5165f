"""Prompts for the demo pair from Python itself: its documentation and library sources."""

from __future__ import annotations

import argparse
import inspect
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from transformers import AutoTokenizer

from bench.harness.text import long_text
from support.engines import DEMO

LENGTHS = {"documentation": 800, "argparse": 1_000, "typing": 1_301}  # tokens


@cache
def prompt(name: str) -> list[int]:
    sources = {"argparse": argparse, "typing": typing}
    text = (
        inspect.getsource(sources[name])
        if name in sources
        else "".join(topics[key] for key in sorted(topics))
    )
    return AutoTokenizer.from_pretrained(DEMO / "target")(text[:40_000]).input_ids[: LENGTHS[name]]


def write_passages(folder: Path, lengths: Mapping[str, int]) -> Path:
    """Write files of about these numbers of the demo's tokens; return their folder."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    found = passages(None, tokenizer, list(lengths.values()))
    for name, text in zip(lengths, found, strict=True):
        (folder / name).write_text(text)
    return folder


def passages(text: Path | None, tokenizer: Any, lengths: Sequence[int]) -> list[str]:
    """Return consecutive passages of a long text, of about these numbers of tokens.

    With `text` None, of Python's language reference. After its end the text starts over.
    """
    whole = long_text(text)
    sample = whole[:200_000]
    characters_per_token = len(sample) / len(tokenizer(sample).input_ids)
    parts: list[str] = []
    start = 0
    for length in lengths:
        size = int(length * characters_per_token)
        if start + size > len(whole):
            start = 0
        parts.append(whole[start : start + size])
        start += size
    return parts
