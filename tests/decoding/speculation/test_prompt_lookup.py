"""Prompt lookup proposes what followed the same tokens before, and steps aside where they are
new.
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
from support.toys import PROMPT, VOCAB, HistoryCache, Toy, go_on, known, nest, propose

CPU = torch.device("cpu")


def by_hand(text: list[int], ngram: int, n: int) -> list[int]:
    """What follows the earlier place that agrees longest with the text's end, up to 32 tokens
    before the n-gram.

    Of equals it is the latest that n tokens follow, or else the earliest.
    """
    agreed = {}
    for end in range(ngram, len(text)):
        agree = 0
        while agree < min(end, ngram + 32) and text[end - 1 - agree] == text[-1 - agree]:
            agree += 1
        if agree >= ngram:
            agreed[end] = agree
    best = [end for end in agreed if agreed[end] == max(agreed.values())]
    if not best:
        return []
    enough = [end for end in best if end + n <= len(text)]
    end = enough[-1] if enough else best[0]
    return text[end : end + n]


@pytest.mark.parametrize("ngram", [1, 2, 3, 5])
@pytest.mark.parametrize("vocab", [2, 6])
def test_the_longest_agreement_is_continued(ngram: int, vocab: int) -> None:
    rng = random.Random(ngram)
    for _ in range(300):
        text = [rng.randrange(vocab) for _ in range(rng.randint(1, 60))]
        n = rng.randint(1, 6)
        draft = propose(PromptLookup(TokenSequence(text), ngram, vocab, CPU), n)
        assert draft.tokens.tolist() == by_hand(text, ngram, n)


def test_it_follows_proposals_that_are_taken_back() -> None:
    rng, stands, ahead = random.Random(0), [1, 2, 3], list[int]()
    text = TokenSequence(stands)
    lookup = PromptLookup(text, 2, 5, CPU)
    for _ in range(500):
        if rng.random() < 0.5:
            stands += ahead[:7]
            text.append(ahead[:7])
            ahead = []
        since = rng.randint(max(0, len(ahead) - 8), len(ahead))
        ahead = [*ahead[:since], *(rng.randrange(5) for _ in range(rng.randint(1, 9)))]
        lookup.sync(ahead)
        assert known(lookup) == [*stands, *ahead]
        n = rng.randint(1, 4)
        draft = propose(lookup, n).tokens.tolist()
        assert draft == by_hand([*stands, *ahead], 2, n)
        assert known(lookup) == [*stands, *ahead, *draft]
        ahead = [*ahead, *draft[: rng.randint(0, len(draft))]]
        assert text.tokens_from(0) == stands
    assert len(known(lookup)) > 1024  # more than there was room for


def test_its_law_is_one_hot() -> None:
    draft = propose(PromptLookup(TokenSequence([1, 2, 3, 0, 1, 2]), 2, 7, CPU), 3)
    assert draft.tokens.tolist() == [3, 0, 1]
    assert torch.equal(draft.probs, torch.nn.functional.one_hot(draft.tokens, 7).float())


def test_nothing_found_is_nothing_proposed() -> None:
    for text in ([1], [1, 2], [1, 2, 3, 4]):
        draft = propose(PromptLookup(TokenSequence(text), 2, 7, CPU), 5)
        assert draft.tokens.shape == (0,)
        assert draft.probs.shape == (0, 7)


def test_what_is_new_is_left_to_the_level_below() -> None:
    model, sampling, text = Toy(0, 1.5), Sampling(1.0, top_p=1), TokenSequence(PROMPT)
    chance = make_randomness(sampling, CPU, is_coupled=False)
    leaf = Autoregressive("leaf", model, HistoryCache(), text, sampling, chance)
    lookup = PromptLookup(text, 3, VOCAB, CPU, leaf)
    rng, asked = random.Random(1), 0
    for _ in range(200):
        stands = text.tokens_from(0)
        continuation, before = by_hand(stands, 3, 3), leaf.stats.produced
        draft = propose(lookup, 3)
        tokens = draft.tokens.tolist()
        if continuation:
            assert tokens == continuation
            assert leaf.stats.produced == before
        else:
            asked += 1
            assert known(leaf) == known(lookup) == [*stands, *tokens]
            want = [model.logits([*stands, *tokens[:end]]) for end in range(3)]
            assert torch.equal(draft.probs, sampling.probs(torch.stack(want)))
        text.append([*tokens[: rng.randint(0, 2)], rng.randrange(VOCAB)])
        lookup.sync([])
    assert 10 < asked < 190


def test_a_text_that_repeats_itself_is_copied() -> None:
    certain = GREEDY  # a greedy toy is soon in a loop
    decoder = nest([Toy(3, 20.0)], [8], certain, torch.Generator(), ngram=2)
    plain = nest([Toy(3, 20.0)], [], certain, torch.Generator())
    assert go_on(decoder, 200) == go_on(plain, 200)
    assert decoder.stats.forwards < 40


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        PromptLookup(TokenSequence([1]), 0, 7, CPU)
