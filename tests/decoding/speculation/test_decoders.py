"""Invariants of nested decoders at every step: one sequence, exact draft probs, consistent
counts.
"""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch

from decoding import GREEDY, Sampling
from decoding.config.defaults import PROBS_ROWS
from decoding.speculation import decoders
from decoding.speculation.coroutines import Steps, run
from decoding.speculation.decoders import Autoregressive, Decoder, Proposer, Speculative
from decoding.speculation.draft_length import Fixed
from decoding.speculation.logits_processors import make_processors
from decoding.speculation.randomness import IndependentNoise
from decoding.speculation.rejection_sampler import Draft
from decoding.speculation.sequence import TokenSequence
from offload.cache.base import Cache
from support.toys import (
    PROMPT,
    VOCAB,
    HistoryCache,
    Toy,
    WideToy,
    apply_processors,
    forward,
    generate,
    nest,
    propose,
    restart,
    tokens_of,
)

FULL = Sampling(1.0, top_p=1)
LENGTHS = [[1], [4], [1, 1], [4, 1], [2, 3], [4, 2], [3, 2, 2]]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def unrelated_models(levels: int) -> list[Toy]:
    return [Toy(seed, 1.5) for seed in range(levels)]


def consistent(level: Proposer) -> bool:
    """Return whether a level's cache holds the tokens of the level, except pending ones."""
    assert isinstance(level, Decoder)
    cache = level.cache
    assert isinstance(cache, HistoryCache)
    return (
        cache.length <= len(tokens_of(level))
        and cache.history[: cache.length] == tokens_of(level)[: cache.length]
    )


@pytest.mark.parametrize("lengths", LENGTHS)
def test_caches_hold_the_tokens_of_their_level(lengths: list[int]) -> None:
    decoder = nest(unrelated_models(len(lengths) + 1), lengths, FULL, generator())
    sequence = list(PROMPT)
    for step in range(300):
        sequence += run(decoder.round(1 + step % 7), forward)
        assert tokens_of(decoder) == decoder.sequence.tokens_from(0) == sequence
        assert decoder.cache.length == len(sequence) - 1
        assert all(consistent(level) for level in decoder.levels())
        if step % 50 == 49:
            restart(decoder)
            sequence = list(PROMPT)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_level_drafts_after_the_tokens_of_the_level_above(lengths: list[int]) -> None:
    decoder = nest(unrelated_models(len(lengths) + 1), lengths, FULL, generator())
    drafts = 0

    def check_drafts(above: Speculative) -> None:
        propose = above.inner.propose

        def call(n: int) -> Steps[Draft]:
            nonlocal drafts
            drafts += 1
            assert tokens_of(above.inner) == tokens_of(above)
            draft = yield from propose(n)
            assert tokens_of(above.inner) == [*tokens_of(above), *draft.tokens.tolist()]
            assert len(draft.tokens) == n
            return draft

        above.inner.propose = call  # type: ignore[method-assign]

    for level in decoder.levels():
        if isinstance(level, Speculative):
            check_drafts(level)
    generate(decoder, 300)
    assert drafts > 50


@pytest.mark.parametrize("lengths", [[], [3], [4, 2], [3, 2, 2]])
@pytest.mark.parametrize("sampling", [FULL, Sampling(0.6, top_p=0.9), GREEDY])
def test_draft_probs_are_the_distributions_of_the_model(
    lengths: list[int], sampling: Sampling
) -> None:
    models = unrelated_models(len(lengths) + 1)
    decoder = nest(models, lengths, sampling, generator())
    for n in [1, 2, 5, 1, 8, 3] * 5:
        sequence = tokens_of(decoder)
        draft = propose(decoder, n)
        assert tokens_of(decoder) == [*sequence, *draft.tokens.tolist()]
        prefixes = [tokens_of(decoder)[: len(sequence) + i] for i in range(n)]
        logits = torch.stack([models[0].logits(prefix) for prefix in prefixes])
        assert torch.equal(draft.probs, sampling.probs(logits))


@pytest.mark.parametrize("lengths", [[3], [4, 2], [3, 2, 2], [4, 3, 2, 1]])
def test_drafts_of_the_target_model_itself_are_never_rejected(lengths: list[int]) -> None:
    # any cache that is out of sync with the sequence would change some distribution
    decoder = nest([Toy(0, 1.5)] * (len(lengths) + 1), lengths, FULL, generator())
    for _ in range(20):
        restart(decoder)
        generate(decoder, 40)
    assert all(
        level.stats.accepted == level.stats.proposed > 100 for level in decoder.levels()[:-1]
    )


@pytest.mark.parametrize("lengths", LENGTHS)
def test_greedy_output_is_that_of_the_target_alone(lengths: list[int]) -> None:
    models = unrelated_models(len(lengths) + 1)
    expected = generate(nest(models[:1], [], GREEDY, generator()), 60)
    assert generate(nest(models, lengths, GREEDY, generator()), 60) == expected
    assert len(set(expected)) == VOCAB


@pytest.mark.parametrize(("lengths", "limit"), list(product([[], [1], [4], [4, 2]], [1, 2, 3, 9])))
def test_a_round_produces_one_to_limit_tokens(lengths: list[int], limit: int) -> None:
    decoder = nest(unrelated_models(len(lengths) + 1), lengths, FULL, generator())
    sizes = {len(run(decoder.round(limit), forward)) for _ in range(200)}
    max_size = min(limit, lengths[0] + 1) if lengths else 1
    assert sizes == set(range(1, max_size + 1))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_counts_of_all_levels_add_up(lengths: list[int]) -> None:
    decoder = nest(unrelated_models(len(lengths) + 1), lengths, FULL, generator())
    assert len(generate(decoder, 200)) == decoder.stats.produced == 200
    levels = decoder.levels()
    for above, below in pairwise(levels):
        # every token that a level drafts is verified
        assert above.stats.proposed == below.stats.produced
        assert above.stats.produced == above.stats.accepted + above.stats.forwards
        assert (
            above.stats.acceptance_rate == above.stats.accepted / above.stats.proposed
            if above.stats.proposed
            else True
        )
    assert levels[-1].stats.forwards == levels[-1].stats.produced


def test_a_draft_length_of_0_is_invalid() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Fixed(0)


def test_a_level_with_many_pending_tokens_catches_up_in_several_forwards() -> None:
    model = Toy(0, 1.5)
    sizes: list[int] = []

    def counted(tokens: torch.Tensor, cache: Cache, rows: int) -> torch.Tensor:
        sizes.append(len(tokens))
        return model(tokens, cache, rows)

    sequence = [*PROMPT, *([1, 2, 3] * 40)]
    randomness = IndependentNoise(generator())
    leaf = Autoregressive(
        "leaf", counted, HistoryCache(), TokenSequence(sequence), FULL, randomness
    )
    leaf.sync([])
    draft = propose(leaf, 3)
    assert sizes == [32, 32, 32, 27, 1, 1]
    logits = [model.logits([*sequence, *draft.tokens[:end].tolist()]) for end in range(3)]
    assert torch.equal(draft.probs, FULL.probs(torch.stack(logits)))


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(0.7, top_p=1),
        Sampling(0.7, top_k=50, top_p=1),
        Sampling(0.7, top_k=1990, top_p=0.99),
        Sampling(0.7, top_p=0.9),
        Sampling(3.0, top_p=0.97),  # flat: a whole row is sorted
        Sampling(0.7, top_p=1, min_p=0.1),
        Sampling(0.7, top_p=0.8, repetition_penalty=1.2, frequency_penalty=0.3),
        Sampling(0.7, top_p=0.8, presence_penalty=-0.2, logit_bias={5: 3.0}),
    ],
)
@pytest.mark.parametrize("length", [PROBS_ROWS, 4 * PROBS_ROWS, 99])
def test_distributions_of_blocks_of_rows_are_those_of_all_rows_at_once(
    sampling: Sampling, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit; the last draft length leaves a block with fewer rows."""
    outputs = []
    for rows in (PROBS_ROWS, 1000):
        monkeypatch.setattr(decoders, "PROBS_ROWS", rows)
        model = WideToy(2000, scale=3.0)
        decoder = nest([model, model], [length], sampling, generator())
        apply_processors(decoder, make_processors(sampling, torch.tensor(PROMPT)))
        found = list[torch.Tensor]()
        decoder.on_logits = lambda _, probs, found=found: found.append(probs)  # type: ignore[misc]
        tokens = run(decoder.round(1000), forward)
        assert len(tokens) == len(found[0]) == length + 1
        outputs.append((tokens, found[0]))
    (tokens, probs), (expected_tokens, expected_probs) = outputs
    assert tokens == expected_tokens
    assert torch.equal(probs, expected_probs)
