"""Prompts for the demo pair, of what is on every machine: prose of Python's documentation, and
sources of its library.
"""

from __future__ import annotations

import argparse
import inspect
import typing
from functools import cache
from pydoc_data.topics import topics

from transformers import AutoTokenizer

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
