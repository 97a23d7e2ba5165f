"""What a GGUF file may say of its tokenizer: types, and bounds that no vocabulary exceeds.

Beyond the bounds a tokenizer would take minutes to make, in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from offload.errors import TierForceError
from parallel.config_checks import quote

# the largest vocabularies have 262,144 tokens of 1.7 million characters in all, the longest of them
# a few hundred, and half a million merges
MAX_TOKENS = 1 << 20
MAX_CHARACTERS = 1 << 22
MAX_TOKEN = 1024
MAX_MERGES = 1 << 21
_PREFIX = "tokenizer.ggml."


_FIELDS = {
    "model": str,
    "pre": str,
    "add_bos_token": bool,
    "add_eos_token": bool,
    "add_space_prefix": bool,
}
_LISTS = {"tokens": str, "merges": str, "scores": float, "token_type": int}  # of what
_ONE = {str: "a text", bool: "true or false"}
_MANY = {str: "a list of texts", float: "a list of finite numbers", int: "a list of whole numbers"}


def check_vocabulary(said: Mapping[str, Any]) -> None:
    """Refuse a description that is of other types, or larger than any tokenizer's.

    Args:
        said: the fields of `tokenizer.ggml`, without that prefix, and the `chat_template`.

    Raises TierForceError, which names the field, its value and what is right.
    """
    for name, kind in _FIELDS.items():
        if name in said and not _is(said[name], kind):
            raise _field_error(_PREFIX + name, said[name], _ONE[kind])
    for name, kind in _LISTS.items():
        value = said.get(name, [])
        if not isinstance(value, list):
            raise _field_error(_PREFIX + name, value, _MANY[kind])
        wrong = next((each for each in value if not _is(each, kind)), None)
        if wrong is not None:
            raise _field_error(f"{quote(wrong)} in {_PREFIX}{name}", None, _MANY[kind])
    template = said.get("chat_template")
    if not isinstance(template, str | None):
        raise _field_error("tokenizer.chat_template", template, _ONE[str])
    _check_sizes(said.get("tokens", []), said.get("merges", []))


def _is(value: Any, kind: type) -> bool:
    """Return whether a value is of a type; whole numbers are floats, true and false no numbers."""
    if kind is float:
        return type(value) in (int, float) and isfinite(value)
    return type(value) is kind


def _check_sizes(tokens: Sequence[str], merges: Sequence[str]) -> None:
    """Raise TierForceError for more or longer texts than a tokenizer is made of."""
    for name, texts, most in (("token", tokens, MAX_TOKENS), ("merge", merges, MAX_MERGES)):
        if len(texts) > most:
            raise TierForceError(
                f"its vocabulary has {len(texts):,} {name}s, and at most {most:,} are read."
            )
    for name, texts, most in (("token", tokens, MAX_TOKEN), ("merge", merges, 2 * MAX_TOKEN + 1)):
        longest = max(map(len, texts), default=0)
        if longest > most:
            raise TierForceError(
                f"its vocabulary has a {name} of {longest:,} characters, and at most {most:,} are "
                "read: the file is broken."
            )
    if (characters := sum(map(len, tokens))) > MAX_CHARACTERS:
        raise TierForceError(
            f"its vocabulary's tokens have {characters:,} characters, and at most "
            f"{MAX_CHARACTERS:,} are read: the file is broken."
        )


def _field_error(what: str, value: Any, wanted: str) -> TierForceError:
    given = what if value is None else f"{what} = {quote(value)}"
    return TierForceError(f"its metadata has {given}; it must be {wanted}.")
