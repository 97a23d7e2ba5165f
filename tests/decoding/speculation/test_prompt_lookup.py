"""Prompt lookup drafts what followed the same tokens before, and leaves new ones to the level
below.
"""

from __future__ import annotations

import random

import pytest
import torch

from decoding import GREEDY, Sampling
from decoding.speculation.decoders import Autoregressive
from decoding.speculation.prompt_lookup import PromptLookup
from decoding.speculation.randomness import make_randomness
from decoding.speculation.sequence import TokenSequence
from support.toys import PROMPT, VOCAB, HistoryCache, Toy, generate, nest, propose, tokens_of

CPU = torch.device("cpu")


def reference_lookup(tokens: list[int], ngram: int, n: int) -> list[int]:
    """Return what follows the longest earlier match of the last tokens.

    At most 32 tokens before the n-gram are compared. On a tie it is the latest match that n tokens
    follow, or else the earliest.
    """
    matches = {}
    for end in range(ngram, len(tokens)):
        length = 0
        while length < min(end, ngram + 32) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= ngram:
            matches[end] = length
    best = [end for end in matches if matches[end] == max(matches.values())]
    if not best:
        return []
    enough = [end for end in best if end + n <= len(tokens)]
    end = enough[-1] if enough else best[0]
    return tokens[end : end + n]


@pytest.mark.parametrize("ngram", [1, 2, 3, 5])
@pytest.mark.parametrize("vocab", [2, 6])
def test_the_longest_match_is_continued(ngram: int, vocab: int) -> None:
    rng = random.Random(ngram)
    for _ in range(300):
        tokens = [rng.randrange(vocab) for _ in range(rng.randint(1, 60))]
        n = rng.randint(1, 6)
        draft = propose(PromptLookup(TokenSequence(tokens), ngram, vocab, CPU), n)
        assert draft.tokens.tolist() == reference_lookup(tokens, ngram, n)


def test_lookup_uses_unverified_tokens_until_they_are_rejected() -> None:
    rng, committed, unverified = random.Random(0), [1, 2, 3], list[int]()
    sequence = TokenSequence(committed)
    lookup = PromptLookup(sequence, 2, 5, CPU)
    for _ in range(500):
        if rng.random() < 0.5:
            committed += unverified[:7]
            sequence.append(unverified[:7])
            unverified = []
        count = rng.randint(max(0, len(unverified) - 8), len(unverified))
        unverified = [*unverified[:count], *(rng.randrange(5) for _ in range(rng.randint(1, 9)))]
        lookup.sync(unverified)
        assert tokens_of(lookup) == [*committed, *unverified]
        n = rng.randint(1, 4)
        draft = propose(lookup, n).tokens.tolist()
        assert draft == reference_lookup([*committed, *unverified], 2, n)
        assert tokens_of(lookup) == [*committed, *unverified, *draft]
        unverified = [*unverified, *draft[: rng.randint(0, len(draft))]]
        assert sequence.tokens_from(0) == committed
    assert len(tokens_of(lookup)) > 1024  # the buffer has grown


def test_draft_probs_are_one_hot() -> None:
    draft = propose(PromptLookup(TokenSequence([1, 2, 3, 0, 1, 2]), 2, 7, CPU), 3)
    assert draft.tokens.tolist() == [3, 0, 1]
    assert torch.equal(draft.probs, torch.nn.functional.one_hot(draft.tokens, 7).float())


def test_without_a_match_the_draft_is_empty() -> None:
    for tokens in ([1], [1, 2], [1, 2, 3, 4]):
        draft = propose(PromptLookup(TokenSequence(tokens), 2, 7, CPU), 5)
        assert draft.tokens.shape == (0,)
        assert draft.probs.shape == (0, 7)


def test_without_a_match_the_level_below_drafts() -> None:
    model, sampling, sequence = Toy(0, 1.5), Sampling(1.0, top_p=1), TokenSequence(PROMPT)
    randomness = make_randomness(sampling, CPU, noise_positions=0)
    leaf = Autoregressive("leaf", model, HistoryCache(), sequence, sampling, randomness)
    lookup = PromptLookup(sequence, 3, VOCAB, CPU, leaf)
    rng, misses = random.Random(1), 0
    for _ in range(200):
        committed = sequence.tokens_from(0)
        continuation, before = reference_lookup(committed, 3, 3), leaf.stats.produced
        draft = propose(lookup, 3)
        tokens = draft.tokens.tolist()
        if continuation:
            assert tokens == continuation
            assert leaf.stats.produced == before
        else:
            misses += 1
            assert tokens_of(leaf) == tokens_of(lookup) == [*committed, *tokens]
            logits = [model.logits([*committed, *tokens[:end]]) for end in range(3)]
            assert torch.equal(draft.probs, sampling.probs(torch.stack(logits)))
        sequence.append([*tokens[: rng.randint(0, 2)], rng.randrange(VOCAB)])
        lookup.sync([])
    assert 10 < misses < 190


def test_a_repetitive_sequence_takes_few_forwards() -> None:
    # a greedy toy model soon repeats itself
    decoder = nest([Toy(3, 20.0)], [8], GREEDY, torch.Generator(), ngram=2)
    plain = nest([Toy(3, 20.0)], [], GREEDY, torch.Generator())
    assert generate(decoder, 200) == generate(plain, 200)
    assert decoder.stats.forwards < 40


def test_an_ngram_of_0_is_invalid() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        PromptLookup(TokenSequence([1]), 0, 7, CPU)
