"""What a GGUF file may say of its tokenizer: types, and bounds that no vocabulary exceeds.

Beyond the bounds a tokenizer would take minutes to make, in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from offload.errors import TierForceError
from parallel.config_checks import shown

# the largest vocabularies have 262,144 tokens of 1.7 million characters in all, the longest of them
# a few hundred, and half a million merges
MAX_TOKENS = 1 << 20
MAX_CHARACTERS = 1 << 22
MAX_TOKEN = 1024
MAX_MERGES = 1 << 21
_PREFIX = "tokenizer.ggml."


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)


def _is_whole(value: Any) -> bool:
    return type(value) is int


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_is_text, "a text"),
    "pre": (_is_text, "a text"),
    "add_bos_token": (lambda value: isinstance(value, bool), "true or false"),
    "add_eos_token": (lambda value: isinstance(value, bool), "true or false"),
    "add_space_prefix": (lambda value: isinstance(value, bool), "true or false"),
}
_LISTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tokens": (_is_text, "texts"),
    "merges": (_is_text, "texts"),
    "scores": (_is_number, "finite numbers"),
    "token_type": (_is_whole, "whole numbers"),
}


def check_vocabulary(said: Mapping[str, Any]) -> None:
    """Refuse a description that is of other types, or larger than any tokenizer's.

    Args:
        said: the fields of `tokenizer.ggml`, without that prefix, and the `chat_template`.

    Raises TierForceError, which names the field, its value and what is right.
    """
    for name, (is_right, wanted) in _FIELDS.items():
        if name in said and not is_right(said[name]):
            raise _mistake(_PREFIX + name, said[name], wanted)
    for name, (is_right, wanted) in _LISTS.items():
        value = said.get(name, [])
        if not isinstance(value, list):
            raise _mistake(_PREFIX + name, value, f"a list of {wanted}")
        wrong = next((each for each in value if not is_right(each)), None)
        if wrong is not None:
            raise _mistake(f"{shown(wrong)} in {_PREFIX}{name}", None, f"a list of {wanted}")
    template = said.get("chat_template")
    if not isinstance(template, str | None):
        raise _mistake("tokenizer.chat_template", template, "a text")
    _check_sizes(said.get("tokens", []), said.get("merges", []))


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


def _mistake(what: str, value: Any, wanted: str) -> TierForceError:
    given = what if value is None else f"{what} = {shown(value)}"
    return TierForceError(f"its metadata has {given}; it must be {wanted}.")
