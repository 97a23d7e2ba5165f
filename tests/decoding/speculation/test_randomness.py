"""Noise that is bound to positions: one text, whatever is proposed, and the law is the target's."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from decoding.speculation.randomness import GumbelCoupled
from decoding.speculation.rejection_sampler import Draft
from decoding.speculation.sampling import GREEDY, Sampling
from offload.errors import InvalidRequestError
from support.laws import LIKELY, frequencies, p_value
from support.slow import slow_except
from support.toys import VOCAB, Toy, go_on, nest, number

CPU = torch.device("cpu")
LENGTHS: list[list[int]] = [[1], [4], [1, 1], [4, 1], [2, 3], [3, 2, 2]]
SAMPLINGS = [Sampling(1.0, top_p=1), Sampling(0.6, top_p=0.9), Sampling(2.0, 3, 1), GREEDY]


def strangers(levels: int) -> list[Toy]:
    return [Toy(seed, 1.5) for seed in range(levels)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_text_is_that_of_plain_decoding(sampling: Sampling) -> None:
    for seed in range(1 if sampling is GREEDY else 2):  # greedily there is no noise
        plain = go_on(nest(strangers(1), [], sampling, GumbelCoupled(seed, CPU)), 40)
        for lengths in LENGTHS:
            models = strangers(len(lengths) + 1)
            for ngram in (0, 2):
                decoder = nest(models, lengths, sampling, GumbelCoupled(seed, CPU), ngram)
                assert go_on(decoder, 40) == plain


@pytest.mark.parametrize("lengths", [[], [3], [3, 2]])
@pytest.mark.parametrize("sampling", slow_except(SAMPLINGS[:2]))
@pytest.mark.parametrize("count", slow_except([1000, 3000]))
def test_texts_follow_the_law(count: int, lengths: list[int], sampling: Sampling) -> None:
    models = strangers(len(lengths) + 1)
    texts = []
    for seed in range(count):
        decoder = nest(models, lengths, sampling, GumbelCoupled(seed, CPU))
        texts.append(number(go_on(decoder, 3)))
    counts = frequencies(texts, VOCAB**3)
    assert p_value(counts, models[0].text_law(sampling, 3)) > LIKELY


def test_positions_and_seeds_have_noise_of_their_own() -> None:
    """Neighbours in either are as unlike as any."""
    law = torch.ones(8)
    one = [int(GumbelCoupled(seed, CPU).draw(law, 5)) for seed in range(4000)]
    chance = GumbelCoupled(3, CPU)
    other = [int(chance.draw(law, position)) for position in range(4000)]
    for drawn in (one, other):
        assert p_value(frequencies(drawn, 8), law) > LIKELY
        pairs = [8 * a + b for a, b in pairwise(drawn)]
        assert p_value(frequencies(pairs, 64), torch.ones(64)) > LIKELY
    again = GumbelCoupled(3, CPU)
    assert [int(again.draw(law, position)) for position in reversed(range(100))] == other[99::-1]


def test_a_proposal_stands_as_often_as_the_coupling_says() -> None:
    """At most twice as much is rejected as the laws differ (Daliri et al., Theorem 2)."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    laws = torch.stack((p, p))
    stood = 0
    for seed in range(4000):
        chance = GumbelCoupled(seed, CPU)
        token = chance.draw(q, 7)
        accepted, _ = chance.rejection_sample(Draft(token, q[None]), laws, 7)
        stood += accepted
    differ = float((p - q).clamp(min=0).sum())
    expected = float(sum(1 / torch.maximum(p / p[i], q / q[i]).sum() for i in range(3)))
    assert abs(stood / 4000 - expected) < 0.03
    assert 1 - stood / 4000 < 2 * differ / (1 + differ) + 0.03


def test_what_is_no_number_is_refused_where_it_is_looked_at() -> None:
    chance = GumbelCoupled(1, CPU)
    good = torch.tensor([0.0, 1.0, 0.0])
    bad = good * torch.nan
    draft = Draft(torch.tensor([1, 1]), torch.stack((good, good)))
    with pytest.raises(InvalidRequestError, match="not numbers"):
        chance.rejection_sample(draft, torch.stack((good, bad, good)), 0)
    wrong = Draft(torch.tensor([2, 1]), torch.stack((good, good)))
    assert chance.rejection_sample(wrong, torch.stack((good, bad, bad)), 0) == (0, 1)
