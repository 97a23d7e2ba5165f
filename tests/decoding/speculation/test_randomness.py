"""Gumbel coupling: the output does not depend on drafts and follows the target's distribution."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from decoding.speculation.randomness import GumbelCoupled
from decoding.speculation.rejection_sampler import Draft
from decoding.speculation.sampling import GREEDY, Sampling
from offload.errors import InvalidRequestError
from support.distributions import LIKELY, frequencies, p_value
from support.slow import slow_except
from support.toys import PROMPT, VOCAB, Toy, continuation_index, generate, nest

CPU = torch.device("cpu")
LENGTHS: list[list[int]] = [[1], [4], [1, 1], [4, 1], [2, 3], [3, 2, 2]]
SAMPLINGS = [Sampling(1.0, top_p=1), Sampling(0.6, top_p=0.9), Sampling(2.0, 3, 1), GREEDY]


def unrelated_models(levels: int) -> list[Toy]:
    return [Toy(seed, 1.5) for seed in range(levels)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_output_is_that_of_plain_decoding(sampling: Sampling) -> None:
    for seed in range(1 if sampling is GREEDY else 2):  # greedy sampling uses no noise
        plain = generate(nest(unrelated_models(1), [], sampling, GumbelCoupled(seed, CPU, 8)), 40)
        for lengths in LENGTHS:
            models = unrelated_models(len(lengths) + 1)
            for ngram in (0, 2):
                decoder = nest(models, lengths, sampling, GumbelCoupled(seed, CPU, 8), ngram)
                assert generate(decoder, 40) == plain


@pytest.mark.parametrize("lengths", [[], [3], [3, 2]])
@pytest.mark.parametrize("sampling", slow_except(SAMPLINGS[:2]))
@pytest.mark.parametrize("count", slow_except([1000, 3000]))
def test_output_follows_the_target_distribution(
    count: int, lengths: list[int], sampling: Sampling
) -> None:
    models = unrelated_models(len(lengths) + 1)
    indices = []
    for seed in range(count):
        decoder = nest(models, lengths, sampling, GumbelCoupled(seed, CPU, 8))
        indices.append(continuation_index(generate(decoder, 3)))
    counts = frequencies(indices, VOCAB**3)
    assert p_value(counts, models[0].continuation_probs(sampling, 3)) > LIKELY


def test_noise_of_positions_and_seeds_is_independent() -> None:
    """Adjacent positions and seeds are tested."""
    probs = torch.ones(8)
    by_seed = [int(GumbelCoupled(seed, CPU, 8).draw(probs, 5)) for seed in range(4000)]
    randomness = GumbelCoupled(3, CPU, 8)
    by_position = [int(randomness.draw(probs, position)) for position in range(4000)]
    for tokens in (by_seed, by_position):
        assert p_value(frequencies(tokens, 8), probs) > LIKELY
        pairs = [8 * a + b for a, b in pairwise(tokens)]
        assert p_value(frequencies(pairs, 64), torch.ones(64)) > LIKELY
    again = GumbelCoupled(3, CPU, 8)
    repeated = [int(again.draw(probs, position)) for position in reversed(range(100))]
    assert repeated == by_position[99::-1]


def test_acceptance_rate_is_that_of_gumbel_coupling() -> None:
    """The rejection rate is at most 2d / (1 + d), d the total variation (Daliri et al., Thm. 2)."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    target_probs = torch.stack((p, p))
    total = 0
    for seed in range(4000):
        randomness = GumbelCoupled(seed, CPU, 8)
        token = randomness.draw(q, 7)
        accepted, _ = randomness.rejection_sample(Draft(token, q[None]), target_probs, 7)
        total += accepted
    distance = float((p - q).clamp(min=0).sum())
    expected = float(sum(1 / torch.maximum(p / p[i], q / q[i]).sum() for i in range(3)))
    assert abs(total / 4000 - expected) < 0.03
    assert 1 - total / 4000 < 2 * distance / (1 + distance) + 0.03


def test_nan_probs_raise_only_up_to_the_first_rejection() -> None:
    randomness = GumbelCoupled(1, CPU, 8)
    good = torch.tensor([0.0, 1.0, 0.0])
    bad = good * torch.nan
    draft = Draft(torch.tensor([1, 1]), torch.stack((good, good)))
    with pytest.raises(InvalidRequestError, match="NaN"):
        randomness.rejection_sample(draft, torch.stack((good, bad, good)), 0)
    rejected = Draft(torch.tensor([2, 1]), torch.stack((good, good)))
    assert randomness.rejection_sample(rejected, torch.stack((good, bad, bad)), 0) == (0, 1)


@pytest.mark.parametrize("lengths", [[40], [40, 5], [40, 7, 3]])
def test_noise_of_a_position_is_drawn_once(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That holds if as many positions are kept as a draft has, and the one after it."""
    drawn, philox = list[int](), np.random.Philox

    def counting(key: list[int]) -> np.random.Philox:
        drawn.append(key[1])
        return philox(key=key)

    monkeypatch.setattr(np.random, "Philox", counting)
    models = [Toy(0, scale) for scale in (1.5, 1.4, 1.3, 1.2)][: len(lengths) + 1]
    sampling = Sampling(1.0, top_p=1)
    for positions in (41, 30):
        drawn.clear()
        decoder = nest(models, lengths, sampling, GumbelCoupled(0, CPU, positions))
        tokens = generate(decoder, 300)
        acceptance = decoder.stats.acceptance_rate
        assert acceptance is not None
        assert 0.1 < acceptance < 1
        is_once = len(drawn) == len(set(drawn))
        assert is_once == (positions == 41)
        assert set(drawn) == set(range(len(PROMPT), len(PROMPT) + len(tokens)))
