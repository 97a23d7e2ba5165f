"""Probabilities are those of transformers' logits warpers, and samples follow them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoding import GREEDY, Sampling
from decoding.speculation.sampling import draw
from offload.errors import TierForceError
from support.distributions import LIKELY, frequencies, p_value
from support.slow import slow_except


def logits(rows: int = 300, vocab: int = 60, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7, 60, 1000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1.0])
def test_probs_are_those_of_transformers_warpers(
    temperature: float, top_k: int, top_p: float
) -> None:
    # in the order of `generate`; both keep the token that crosses top_p, and all ties with the k-th
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(None, logits()).softmax(-1)
    probs = Sampling(temperature, top_k, top_p).probs(logits())
    assert torch.equal(probs == 0, expected == 0)
    torch.testing.assert_close(probs, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(probs.sum(1), torch.ones(len(probs)))


@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_min_p_is_that_of_transformers(min_p: float, top_p: float) -> None:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    warpers.append(MinPLogitsWarper(min_p))
    expected = warpers(None, logits()).softmax(-1)
    probs = Sampling(0.7, top_p=top_p, min_p=min_p).probs(logits())
    assert torch.equal(probs == 0, expected == 0)
    torch.testing.assert_close(probs, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.25, 1), (0.2501, 2), (0.5, 2), (0.75, 3), (0.7501, 4)]
)
def test_top_p_is_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    # quarters are exact in float32: a mass of exactly top_p is enough
    level = torch.zeros(1, 4)
    probs = Sampling(temperature=1, top_p=top_p).probs(level)
    assert (
        int((probs > 0).sum()) == kept == int(TopPLogitsWarper(top_p)(None, level).isfinite().sum())
    )
    torch.testing.assert_close(probs[probs > 0], torch.full((kept,), 1 / kept))


def test_top_k_keeps_ties() -> None:
    tied = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    assert (Sampling(1, top_k=2, top_p=1).probs(tied) > 0).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("top_p", [0.05, 0.9, 0.999])
def test_nucleus_of_a_large_vocabulary_is_that_of_a_full_sort(top_p: float) -> None:
    sharp, flat = torch.randn(3, 5000, generator=generator()), torch.zeros(2, 5000)
    flat += 0.01 * torch.rand(2, 5000, generator=generator())
    broken = torch.full((1, 5000), torch.nan)
    rows = torch.cat((flat[:1], 4 * sharp, broken, flat[1:], 0.5 * sharp))
    for row, found in zip(rows, Sampling(1.0, top_p=top_p).probs(rows), strict=True):
        alone = Sampling(1.0, top_p=top_p).probs(row[None])[0]
        assert torch.equal(found, alone) or row.isnan().all()
        expected = TopPLogitsWarper(top_p)(None, row[None]).softmax(1)[0]
        torch.testing.assert_close(found, expected, equal_nan=True)
        # an exact comparison: TopPLogitsWarper sums from the other end
        probs = row.softmax(0)
        ordered, order = probs.sort(descending=True)
        outside = order[ordered.cumsum(0) - ordered >= top_p]
        assert torch.equal(found == 0, probs.index_fill(0, outside, 0) == 0)


def test_top_k_comes_before_top_p() -> None:
    masses = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    probs = Sampling(temperature=1, top_k=2, top_p=0.5).probs(masses.log())
    # 0.4 / 0.7 reaches 0.5 by itself, 0.4 does not
    torch.testing.assert_close(probs, torch.tensor([[1.0, 0, 0, 0]]))


def test_greedy_is_one_hot_at_the_greatest_logit() -> None:
    probs = GREEDY.probs(logits())
    assert torch.equal(probs.argmax(1), logits().argmax(1))
    assert torch.equal(probs.sort(1).values[:, -2:], torch.tensor([0.0, 1.0]).expand(len(probs), 2))


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(1.0, top_p=1),
        Sampling(0.6, top_p=0.9),
        Sampling(1.0, 5, 1),
        Sampling(1.0, 5, 0.9),
    ],
)
def test_a_row_with_a_nan_becomes_nan_and_others_are_unaffected(sampling: Sampling) -> None:
    broken = logits(3)
    broken[1, 17] = torch.nan
    probs = sampling.probs(broken)
    assert probs[1].isnan().all()
    assert torch.equal(probs[[0, 2]], sampling.probs(logits(3))[[0, 2]])


@pytest.mark.parametrize("scale", slow_except([1.0, 37.0, 1e-6]))
@pytest.mark.parametrize(
    "probs",
    [
        [0.5, 0.3, 0.1, 0.06, 0.03, 0.01],
        [1, 1, 1, 1],
        [0.001, 0.999],
        [0, 0.25, 0, 0.75],
        [0, 0, 0.2, 0, 0.5, 0, 0, 0.3, 0],  # most have none
        [0, 0, 0, 1],
    ],
)
def test_samples_follow_the_distribution(probs: list[float], scale: float) -> None:
    source, weights = generator(1), torch.tensor(probs)
    samples = [int(draw(weights * scale, source)) for _ in range(10_000)]
    assert p_value(frequencies(samples, len(probs)), weights) > LIKELY


def test_successive_samples_are_independent() -> None:
    source, probs = generator(2), torch.tensor([0.5, 0.3, 0.2])
    pairs = [3 * int(draw(probs, source)) + int(draw(probs, source)) for _ in range(10_000)]
    assert p_value(frequencies(pairs, 9), torch.outer(probs, probs)) > LIKELY


def test_tokens_rarer_than_float32_noise_are_not_sampled_too_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch's portable generator is exactly 0 once in 2**24 float32 numbers; that of MKL is not
    def portable(self: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return self.copy_(
            -torch.rand(self.shape, dtype=self.dtype, generator=generator).neg_().log1p_()
        )

    monkeypatch.setattr(torch.Tensor, "exponential_", portable)
    probs, source = torch.full((2**16,), 2.0**-40), generator(3)
    probs[0] = 1
    # a rare token occurs once in 2**24 samples, not in 2**8
    assert all(int(draw(probs, source)) == 0 for _ in range(2_000))


@pytest.mark.cuda(standin=False)
def test_tokens_rarer_than_float32_noise_are_not_sampled_too_rarely() -> None:
    # 2**18 tokens of 2**-25 each: float32 noise on a GPU is never below 2**-24, and would sample
    # them less than half as often
    probs = torch.full((2**18 + 1,), 2.0**-25, device="cuda")
    probs[0] = 1 - 2.0**-7
    source = torch.Generator("cuda").manual_seed(3)
    common = int(sum(draw(probs, source) == 0 for _ in range(30_000)))
    assert (
        p_value(torch.tensor([common, 30_000 - common]), torch.tensor([1 - 2.0**-7, 2.0**-7]))
        > LIKELY
    )


@pytest.mark.parametrize("noise", [0.0, 1e-30, 800.0])
def test_a_token_of_probability_0_is_never_sampled(
    noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # extreme noise that no seed would produce: 0 / 0 is NaN, and argmax prefers a NaN
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, generator: self.fill_(noise))
    assert int(draw(torch.tensor([0.0, 0, 1e-38, 0]), generator())) == 2


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_a_broken_distribution_gives_some_token(value: float) -> None:
    """What it was computed from is refused later (`rejection_sampler.to_host`)."""
    assert 0 <= int(draw(torch.full((9,), value), generator())) < 9


def test_equal_seeds_give_equal_samples() -> None:
    probs = logits(1)[0].softmax(0)
    first, second = (
        [int(draw(probs, source)) for _ in range(50)] for source in (generator(4), generator(4))
    )
    assert first == second
    assert len(set(first)) > 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", 2**63),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: float("nan")}),
    ],
)
def test_sampling_options_out_of_range_are_rejected(name: str, value: Any) -> None:
    with pytest.raises(TierForceError, match=r"must (be|have)"):
        Sampling(**{name: value})
