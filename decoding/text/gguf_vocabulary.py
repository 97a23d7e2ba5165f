"""Validation of a GGUF file's tokenizer fields: types, and sizes that no real vocabulary exceeds.

Building a larger tokenizer would take minutes, without any output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from offload.errors import TierForceError
from parallel.config_checks import quote

# the largest vocabularies have 262,144 tokens of 1.7 million characters in total, at most a few
# hundred per token, and half a million merges
MAX_TOKENS = 1 << 20
MAX_CHARACTERS = 1 << 22
MAX_TOKEN = 1024  # characters
MAX_MERGES = 1 << 21
_PREFIX = "tokenizer.ggml."


_FIELDS = {
    "model": str,
    "pre": str,
    "add_bos_token": bool,
    "add_eos_token": bool,
    "add_space_prefix": bool,
}
_LISTS = {"tokens": str, "merges": str, "scores": float, "token_type": int}  # element types
_ONE = {str: "a string", bool: "true or false"}
_MANY = {str: "a list of strings", float: "a list of finite numbers", int: "a list of integers"}


def check_vocabulary(metadata: Mapping[str, Any]) -> None:
    """Raise TierForceError for fields of a wrong type, or larger than any real vocabulary.

    The error names the field, its value and what it must be.

    Args:
        metadata: the fields of `tokenizer.ggml`, without that prefix, and the `chat_template`.
    """
    for name, kind in _FIELDS.items():
        if name in metadata and not _has_type(metadata[name], kind):
            raise _field_error(_PREFIX + name, metadata[name], _ONE[kind])
    for name, kind in _LISTS.items():
        value = metadata.get(name, [])
        if not isinstance(value, list):
            raise _field_error(_PREFIX + name, value, _MANY[kind])
        wrong = next((each for each in value if not _has_type(each, kind)), None)
        if wrong is not None:
            raise _field_error(f"{quote(wrong)} in {_PREFIX}{name}", None, _MANY[kind])
    template = metadata.get("chat_template")
    if not isinstance(template, str | None):
        raise _field_error("tokenizer.chat_template", template, _ONE[str])
    _check_sizes(metadata.get("tokens", []), metadata.get("merges", []))


def _has_type(value: Any, kind: type) -> bool:
    """Return whether a value has a type; integers count as floats, booleans not as integers."""
    if kind is float:
        return type(value) in (int, float) and isfinite(value)
    return type(value) is kind


def _check_sizes(tokens: Sequence[str], merges: Sequence[str]) -> None:
    """Raise TierForceError for more or longer tokens or merges than any real vocabulary has."""
    for name, strings, maximum in (("token", tokens, MAX_TOKENS), ("merge", merges, MAX_MERGES)):
        if len(strings) > maximum:
            raise TierForceError(
                f"its vocabulary has {len(strings):,} {name}s; at most {maximum:,} are supported."
            )
    max_merge = 2 * MAX_TOKEN + 1
    for name, strings, maximum in (("token", tokens, MAX_TOKEN), ("merge", merges, max_merge)):
        longest = max(map(len, strings), default=0)
        if longest > maximum:
            raise TierForceError(
                f"its vocabulary has a {name} of {longest:,} characters; at most {maximum:,} are "
                "supported: the file is broken."
            )
    if (characters := sum(map(len, tokens))) > MAX_CHARACTERS:
        raise TierForceError(
            f"the tokens of its vocabulary have {characters:,} characters; at most "
            f"{MAX_CHARACTERS:,} are supported: the file is broken."
        )


def _field_error(field: str, value: Any, expected: str) -> TierForceError:
    found = field if value is None else f"{field} = {quote(value)}"
    return TierForceError(f"its metadata has {found}; it must be {expected}.")
