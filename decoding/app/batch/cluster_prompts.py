"""Prompts as rows of a dataset: those that begin alike have their beginning once."""

from __future__ import annotations

import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence

import numpy as np

from decoding.speculation.sequence import common_prefix


def encode_prompts(prompts: Sequence[array[int]]) -> str:
    """Return prompts of token ids (T,) as a string, for a dataset row."""
    first = np.asarray(prompts[0])
    shared = min(common_prefix(first, np.asarray(each)) for each in prompts)
    parts = [prompts[0][:shared], *(each[shared:] for each in prompts)]
    return json.dumps([b64encode(each.tobytes()).decode() for each in parts])


def decode_prompts(encoded: str) -> tuple[list[list[int]], int]:
    """Return the prompts in a string of `encode_prompts`, and how many tokens they share."""
    shared, *rest = (array("i", b64decode(each)).tolist() for each in json.loads(encoded))
    return [[*shared, *each] for each in rest], len(shared)
