"""What nested decoders keep true at every step: one text, one law behind every proposed token,
nothing lost.
"""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch

from decoding import GREEDY, Sampling
from decoding.speculation.coroutines import Steps, run
from decoding.speculation.decoders import Autoregressive, Decoder, Proposer, Speculative
from decoding.speculation.draft_length import Fixed
from decoding.speculation.randomness import IndependentNoise
from decoding.speculation.rejection_sampler import Draft
from decoding.speculation.sequence import TokenSequence
from offload.cache.base import Cache
from support.toys import (
    PROMPT,
    VOCAB,
    HistoryCache,
    Toy,
    answer,
    go_on,
    known,
    nest,
    propose,
    restart,
)

FULL = Sampling(1.0, top_p=1)
LENGTHS = [[1], [4], [1, 1], [4, 1], [2, 3], [4, 2], [3, 2, 2]]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def strangers(levels: int) -> list[Toy]:
    return [Toy(seed, 1.5) for seed in range(levels)]


def consistent(level: Proposer) -> bool:
    """Its cache holds its text, but for what is pending."""
    assert isinstance(level, Decoder)
    cache = level.cache
    assert isinstance(cache, HistoryCache)
    return (
        cache.length <= len(known(level))
        and cache.history[: cache.length] == known(level)[: cache.length]
    )


@pytest.mark.parametrize("lengths", LENGTHS)
def test_caches_hold_the_text_of_their_level(lengths: list[int]) -> None:
    decoder = nest(strangers(len(lengths) + 1), lengths, FULL, generator())
    text = list(PROMPT)
    for step in range(300):
        text += run(decoder.round(1 + step % 7), answer)
        assert known(decoder) == decoder.text.tokens_from(0) == text
        assert decoder.cache.length == len(text) - 1
        assert all(consistent(level) for level in decoder.levels())
        if step % 50 == 49:
            restart(decoder)
            text = list(PROMPT)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_level_drafts_behind_the_text_above_it(lengths: list[int]) -> None:
    decoder = nest(strangers(len(lengths) + 1), lengths, FULL, generator())
    drafts = 0

    def checked(above: Speculative) -> None:
        propose = above.inner.propose

        def call(n: int) -> Steps[Draft]:
            nonlocal drafts
            drafts += 1
            assert known(above.inner) == known(above)
            draft = yield from propose(n)
            assert known(above.inner) == [*known(above), *draft.tokens.tolist()]
            assert len(draft.tokens) == n
            return draft

        above.inner.propose = call  # type: ignore[method-assign]

    for level in decoder.levels():
        if isinstance(level, Speculative):
            checked(level)
    go_on(decoder, 300)
    assert drafts > 50


@pytest.mark.parametrize("lengths", [[], [3], [4, 2], [3, 2, 2]])
@pytest.mark.parametrize("sampling", [FULL, Sampling(0.6, top_p=0.9), GREEDY])
def test_the_law_reported_for_a_token_is_the_model_law_there(
    lengths: list[int], sampling: Sampling
) -> None:
    models = strangers(len(lengths) + 1)
    decoder = nest(models, lengths, sampling, generator())
    for n in [1, 2, 5, 1, 8, 3] * 5:
        text = known(decoder)
        draft = propose(decoder, n)
        assert known(decoder) == [*text, *draft.tokens.tolist()]
        before = [known(decoder)[: len(text) + i] for i in range(n)]
        assert torch.equal(
            draft.probs, sampling.probs(torch.stack([models[0].logits(each) for each in before]))
        )


@pytest.mark.parametrize("lengths", [[3], [4, 2], [3, 2, 2], [4, 3, 2, 1]])
def test_a_level_that_drafts_with_its_own_model_is_never_corrected(lengths: list[int]) -> None:
    # a cache out of step with the text, anywhere, would make some law differ
    decoder = nest([Toy(0, 1.5)] * (len(lengths) + 1), lengths, FULL, generator())
    for _ in range(20):
        restart(decoder)
        go_on(decoder, 40)
    assert all(
        level.stats.accepted == level.stats.proposed > 100 for level in decoder.levels()[:-1]
    )


@pytest.mark.parametrize("lengths", LENGTHS)
def test_greedy_text_is_the_target_own(lengths: list[int]) -> None:
    models = strangers(len(lengths) + 1)
    want = go_on(nest(models[:1], [], GREEDY, generator()), 60)
    assert go_on(nest(models, lengths, GREEDY, generator()), 60) == want
    assert len(set(want)) == VOCAB


@pytest.mark.parametrize(("lengths", "limit"), list(product([[], [1], [4], [4, 2]], [1, 2, 3, 9])))
def test_a_round_writes_one_token_to_its_limit(lengths: list[int], limit: int) -> None:
    decoder = nest(strangers(len(lengths) + 1), lengths, FULL, generator())
    sizes = {len(run(decoder.round(limit), answer)) for _ in range(200)}
    most = min(limit, lengths[0] + 1) if lengths else 1
    assert sizes == set(range(1, most + 1))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_counts_of_all_levels_add_up(lengths: list[int]) -> None:
    decoder = nest(strangers(len(lengths) + 1), lengths, FULL, generator())
    assert len(go_on(decoder, 200)) == decoder.stats.produced == 200
    levels = decoder.levels()
    for above, below in pairwise(levels):
        # a level is asked for exactly what is verified
        assert above.stats.proposed == below.stats.produced
        assert above.stats.produced == above.stats.accepted + above.stats.forwards
        assert (
            above.stats.acceptance_rate == above.stats.accepted / above.stats.proposed
            if above.stats.proposed
            else True
        )
    assert levels[-1].stats.forwards == levels[-1].stats.produced


def test_a_draft_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Fixed(0)


def test_a_level_not_asked_for_long_catches_up_in_passes_it_can_make() -> None:
    model = Toy(0, 1.5)
    sizes: list[int] = []

    def forward(tokens: torch.Tensor, cache: Cache, rows: int) -> torch.Tensor:
        sizes.append(len(tokens))
        return model(tokens, cache, rows)

    cache, text = HistoryCache(), [*PROMPT, *([1, 2, 3] * 40)]
    leaf = Autoregressive(
        "leaf", forward, cache, TokenSequence(text), FULL, IndependentNoise(generator())
    )
    leaf.sync([])
    draft = propose(leaf, 3)
    assert sizes == [32, 32, 32, 27, 1, 1]
    want = [model.logits([*text, *draft.tokens[:end].tolist()]) for end in range(3)]
    assert torch.equal(draft.probs, FULL.probs(torch.stack(want)))
