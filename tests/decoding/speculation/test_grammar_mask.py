"""The mask of a position allows exactly the tokens that some string of the language continues with,
however the positions are visited.
"""

from __future__ import annotations

import itertools
import random
from typing import Any, cast

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from decoding.grammars.grammar import Grammar
from decoding.speculation.grammar_mask import GrammarMask
from offload.errors import InvalidRequestError
from support.grammars import STOP, ToyTokenizer, allowed, toy_mask
from support.toys import VOCAB

# the third leaves one string for a while, the last has no end
PATTERNS = ["(a|b)*", "a{1,3}b?", "abba(a|bb)?", "(ab)*a?", "((a|bb)a)*b"]


def visible(mask: torch.Tensor) -> set[int]:
    """Return the tokens whose logit, in a row (V,), is not -inf."""
    return set(mask.isfinite().nonzero().flatten().tolist())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_are_those_of_the_language_wherever_a_level_moves(pattern: str) -> None:
    source, mask = random.Random(0), toy_mask(pattern)
    path, committed = list[int](), 0
    for _ in range(300):
        if source.random() < 0.05:
            path, committed, mask = [], 0, toy_mask(pattern)
        kept = path[: source.randint(committed, len(path))]
        path = [*kept, *follow_on(pattern, kept, source)][:5]
        committed = source.randint(committed, len(path))
        rows = source.randint(1, len(path) + 1 - committed)
        logits = torch.randn(rows, VOCAB)
        before = logits.clone()
        processed = mask.process(logits, path, committed)
        assert torch.equal(logits, before)
        first = source.randint(0, rows - 1)
        parts = [(logits[:first], rows - first), (logits[first:], 0)][first == 0 :]
        blocks = [mask.process(part, path, committed, after) for part, after in parts]
        assert torch.equal(torch.cat(blocks), processed)
        for row in range(rows):
            tokens = path[: len(path) - rows + 1 + row]
            assert visible(processed[row]) == allowed(pattern, tokens), tokens
        assert torch.equal(processed[processed.isfinite()], before[processed.isfinite()])


def follow_on(pattern: str, kept: list[int], source: random.Random) -> list[int]:
    """Return up to four tokens that may follow."""
    tokens = list(kept)
    for _ in range(source.randint(0, 4)):
        tokens.append(source.choice(sorted(allowed(pattern, tokens))))
    return tokens[len(kept) :]


def test_what_follows_a_forbidden_draft_token_is_not_restricted() -> None:
    mask = toy_mask("ab")
    # b, which no string begins with; should it be accepted, the end would be an error
    rows = mask.process(torch.zeros(3, VOCAB), [1, 0], 0)
    assert [visible(row) for row in rows] == [{0, 2}, {0, 1, 2}, {0, 1, 2}]
    assert visible(mask.process(torch.zeros(1, VOCAB), [0], 1)[0]) == {1}
    with pytest.raises(InvalidRequestError, match="after 1 tokens: it does not allow"):
        mask.process(torch.zeros(1, VOCAB), [1], 1)


def test_the_beginning_of_a_draft_that_the_grammar_allows_is_counted() -> None:
    mask = toy_mask("aab")
    assert mask.count_possible([], [0, 0, 1, STOP]) == 3  # nothing is drafted after the end
    assert mask.count_possible([0], [1, 0]) == 0
    assert mask.count_possible([0], [2]) == 1
    assert mask.count_possible([0, 0, 1, STOP], [0]) == 0
    assert visible(mask.process(torch.zeros(1, VOCAB), [0, 0], 0)[0]) == {1}


def test_a_position_without_any_token_is_an_error_of_the_sequence_alone() -> None:
    with pytest.raises(InvalidRequestError, match="after 0 tokens: none of the model's tokens"):
        toy_mask("cc").process(torch.zeros(1, VOCAB), [], 0)
    mask = toy_mask("ab|bc")
    for _ in range(2):  # after a draft that leads nowhere the others are what they were
        rows = mask.process(torch.zeros(2, VOCAB), [1], 0)
        assert [visible(row) for row in rows] == [{0, 1, 2}, {0, 1, 2}]
        assert visible(mask.process(torch.zeros(1, VOCAB), [0], 0)[0]) == {1}
    with pytest.raises(InvalidRequestError, match="after 1 tokens: none of the model's tokens"):
        mask.process(torch.zeros(1, VOCAB), [1], 1)


def test_a_stop_token_that_is_text_ends_a_whole_answer_only() -> None:
    tokenizer: Any = TokenizerWrapper(ToyTokenizer())
    own = LLTokenizer(tokenizer, n_vocab=VOCAB, eos_token=[STOP])
    matcher = LLMatcher(own, Grammar.regex("(a|b){2}").compose(in_channels=False), log_level=0)
    mask = GrammarMask(matcher, {0, STOP}, VOCAB, VOCAB)  # a ends an answer, too
    assert visible(mask.process(torch.zeros(1, VOCAB), [], 0)[0]) == {1, 2}
    assert visible(mask.process(torch.zeros(1, VOCAB), [2], 1)[0]) == {0, STOP}


def test_a_matcher_that_fails_is_an_error_and_never_ends_the_restriction() -> None:
    """It stays in error once it is, as when it exceeds a limit."""

    class Failing:
        error = ""

        def __init__(self, matcher: LLMatcher):
            self.matcher = matcher

        def __getattr__(self, name: str) -> Any:
            return getattr(self.matcher, name)

        def try_consume_tokens(self, tokens: list[int]) -> int:
            self.error = "too many items"
            return 0

        def get_error(self) -> str:
            return self.error

    for committed in (0, 1):
        mask = toy_mask("(a|b)*")
        mask._matcher._current = cast(LLMatcher, Failing(mask._matcher._current))
        if committed:
            with pytest.raises(InvalidRequestError, match="after 1 tokens: too many items"):
                mask.process(torch.zeros(1, VOCAB), [0], committed)
        else:
            assert visible(mask.process(torch.zeros(1, VOCAB), [0], committed)[0]) == {0, 1, 2}


def test_a_grammar_that_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = toy_mask("(a|b)*")
    seconds = itertools.count(0, 3.0)
    monkeypatch.setattr(
        "decoding.speculation.grammar_mask.time.perf_counter", lambda: next(seconds)
    )
    mask.process(torch.zeros(1, VOCAB), [], 0)
    with pytest.raises(InvalidRequestError, match="takes too long"):
        mask.process(torch.zeros(1, VOCAB), [0], 1)


def test_drafts_that_lead_nowhere_cost_no_masks_of_the_sequence() -> None:
    """After each the matcher begins again."""
    mask, tokens = toy_mask("(a|bc)*"), list[int]()
    for _ in range(200):
        assert mask.count_possible(tokens, [1, 0]) == 0
        rows = mask.process(torch.zeros(2, VOCAB), [*tokens, 1], len(tokens))
        assert [visible(row) for row in rows] == [{0, 1, 2, 3}, {0, 1, 2}]
        tokens.append(0)
    assert mask._matcher._timed == len(tokens)
    assert len(mask._masks) <= 2


def test_stop_tokens_that_the_model_lacks_are_not_allowed() -> None:
    mask = GrammarMask(toy_mask("a")._matcher._start, {STOP}, VOCAB, STOP)
    with pytest.raises(InvalidRequestError, match="after 1 tokens: none of the model's tokens"):
        mask.process(torch.zeros(1, STOP), [0], 1)
