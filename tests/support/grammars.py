"""Regular languages over the tokens of toy models, and which tokens they allow, by enumeration."""

from __future__ import annotations

import itertools
import re
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from decoding.grammars.grammar import Grammar
from decoding.speculation.grammar_mask import GrammarMask
from support.toys import VOCAB

TOKENS = [b"a", b"b", b"ab"]
STOP = 3
_LONGEST = 14  # characters of the strings that are enumerated


class ToyTokenizer:
    """What llguidance needs of a tokenizer with the tokens a, b, ab, and one that ends a text."""

    eos_token_id, bos_token_id = STOP, None
    tokens = (*TOKENS, b"<end>")
    special_token_ids = (STOP,)

    def __call__(self, text: bytes) -> list[int]:
        return [TOKENS.index(text[at : at + 1]) for at in range(len(text))]


def toy_mask(pattern: str) -> GrammarMask:
    """Return the mask of a regular expression over the letters a and b."""
    return GrammarMask(_matcher(pattern).deep_copy(), {STOP}, VOCAB, VOCAB)


@cache
def _matcher(pattern: str) -> LLMatcher:
    """Return a matcher that has read nothing; compiling it takes milliseconds."""
    tokenizer: Any = TokenizerWrapper(ToyTokenizer())
    own = LLTokenizer(tokenizer, n_vocab=VOCAB, eos_token=[STOP])
    matcher = LLMatcher(own, Grammar.regex(pattern).compose(in_channels=False), log_level=0)
    assert not matcher.get_error()
    return matcher


@cache
def language(pattern: str) -> frozenset[str]:
    """Return the strings of a and b that match a regular expression, up to a length."""
    strings = (
        "".join(letters)
        for length in range(_LONGEST + 1)
        for letters in itertools.product("ab", repeat=length)
    )
    return frozenset(text for text in strings if re.fullmatch(pattern, text))


@cache
def prefixes(pattern: str) -> frozenset[str]:
    """Return the beginnings of these strings."""
    return frozenset(text[:end] for text in language(pattern) for end in range(len(text) + 1))


def allowed(pattern: str, tokens: list[int]) -> set[int]:
    """Return the tokens that a regular expression allows after others; all, after the end."""
    if STOP in tokens:
        return set(range(VOCAB))
    text = b"".join(TOKENS[token] for token in tokens).decode()
    found = {token for token, own in enumerate(TOKENS) if text + own.decode() in prefixes(pattern)}
    return found | ({STOP} if text in language(pattern) else set())
