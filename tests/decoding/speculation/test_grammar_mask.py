"""The mask of a position allows exactly the tokens that some string of the language continues with,
however the positions are visited.
"""

from __future__ import annotations

import random

import pytest
import torch

from offload.errors import InvalidRequestError
from support.grammars import STOP, allowed, toy_mask
from support.toys import VOCAB

# the third leaves one string for a while, the last has no end
PATTERNS = ["(a|b)*", "a{1,3}b?", "abba(a|bb)?", "(ab)*a?", "((a|bb)a)*b"]


def visible(mask: torch.Tensor) -> set[int]:
    """Return the tokens whose logit, in a row (V,), is not -inf."""
    return set(mask.isfinite().nonzero().flatten().tolist())


def follow(pattern: str, source: random.Random, length: int) -> list[int]:
    """Return allowed tokens, chosen at random."""
    tokens = list[int]()
    while len(tokens) < length:
        tokens.append(source.choice(sorted(allowed(pattern, tokens))))
    return tokens


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_are_those_of_the_language_wherever_a_level_moves(pattern: str) -> None:
    source, mask = random.Random(0), toy_mask(pattern)
    path = list[int]()
    for _ in range(200):
        kept = path[: source.randint(0, len(path))]
        path = [*kept, *follow_on(pattern, kept, source)][:7]
        rows = source.randint(1, len(path) + 1)
        logits = torch.randn(rows, VOCAB)
        before = logits.clone()
        processed = mask.process(logits, path)
        assert torch.equal(logits, before)
        for row in range(rows):
            tokens = path[: len(path) - rows + 1 + row]
            assert visible(processed[row]) == allowed(pattern, tokens)
        assert torch.equal(processed[processed.isfinite()], before[processed.isfinite()])


def follow_on(pattern: str, kept: list[int], source: random.Random) -> list[int]:
    """Return up to four tokens that may follow."""
    tokens = list(kept)
    for _ in range(source.randint(0, 4)):
        tokens.append(source.choice(sorted(allowed(pattern, tokens))))
    return tokens[len(kept) :]


def test_what_follows_a_forbidden_draft_token_is_not_restricted() -> None:
    mask = toy_mask("ab")
    rows = mask.process(torch.zeros(3, VOCAB), [1, 0])  # b, which no string begins with
    assert [visible(row) for row in rows] == [{0, 2}, {0, 1, 2, 3}, {0, 1, 2, 3}]
    assert visible(mask.process(torch.zeros(1, VOCAB), [0])[0]) == {1}


def test_the_beginning_of_a_draft_that_the_grammar_allows_is_counted() -> None:
    mask = toy_mask("aab")
    assert mask.count_possible([], [0, 0, 1, STOP]) == 3  # nothing is drafted after the end
    assert mask.count_possible([0], [1, 0]) == 0
    assert mask.count_possible([0], [2]) == 1
    assert mask.count_possible([0, 0, 1, STOP], [0]) == 0
    assert visible(mask.process(torch.zeros(1, VOCAB), [0, 0])[0]) == {1}


def test_a_position_without_any_token_is_an_error() -> None:
    mask = toy_mask("cc")
    with pytest.raises(InvalidRequestError, match="after 0 tokens"):
        mask.process(torch.zeros(1, VOCAB), [])
