"""The warped law is transformers' own, and a draw follows the law it is given."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoding import GREEDY, Sampling
from decoding.speculation.sampling import draw
from offload.errors import TierForceError
from support.laws import LIKELY, frequencies, p_value


def logits(rows: int = 300, vocab: int = 60, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7, 60, 1000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1.0])
def test_law_is_that_of_transformers_warpers(temperature: float, top_k: int, top_p: float) -> None:
    # as `generate` chains them; both keep the token that crosses top_p, and all that tie with the
    # k-th
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    want = warpers(None, logits()).softmax(-1)
    found = Sampling(temperature, top_k, top_p).probs(logits())
    assert torch.equal(found == 0, want == 0)
    torch.testing.assert_close(found, want, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.sum(1), torch.ones(len(found)))


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.25, 1), (0.2501, 2), (0.5, 2), (0.75, 3), (0.7501, 4)]
)
def test_top_p_is_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    # quarters are exact in float32, so the threshold itself is tested: a mass of exactly top_p is
    # enough
    level = torch.zeros(1, 4)
    law = Sampling(temperature=1, top_p=top_p).probs(level)
    assert (
        int((law > 0).sum()) == kept == int(TopPLogitsWarper(top_p)(None, level).isfinite().sum())
    )
    torch.testing.assert_close(law[law > 0], torch.full((kept,), 1 / kept))


def test_top_k_keeps_ties() -> None:
    tied = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    assert (Sampling(1, top_k=2, top_p=1).probs(tied) > 0).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("top_p", [0.05, 0.9, 0.999])
def test_a_large_vocabulary_is_cut_row_by_row_as_if_it_were_sorted(top_p: float) -> None:
    sharp, flat = torch.randn(3, 5000, generator=generator()), torch.zeros(2, 5000)
    flat += 0.01 * torch.rand(2, 5000, generator=generator())
    broken = torch.full((1, 5000), torch.nan)
    rows = torch.cat((flat[:1], 4 * sharp, broken, flat[1:], 0.5 * sharp))
    found = Sampling(1.0, top_p=top_p).probs(rows)
    for row, law in zip(rows, found, strict=True):
        alone = Sampling(1.0, top_p=top_p).probs(row[None])[0]
        assert torch.equal(law, alone) or row.isnan().all()
        kept = TopPLogitsWarper(top_p)(None, row[None]).softmax(1)[0]
        torch.testing.assert_close(law, kept, equal_nan=True)
        # to the last token: that one sums from the other end
        probs = row.softmax(0)
        ordered, order = probs.sort(descending=True)
        outside = order[ordered.cumsum(0) - ordered >= top_p]
        assert torch.equal(law == 0, probs.index_fill(0, outside, 0) == 0)


def test_top_k_comes_before_top_p() -> None:
    masses = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    law = Sampling(temperature=1, top_k=2, top_p=0.5).probs(masses.log())
    # 0.4 / 0.7 reaches 0.5 alone; 0.4 does not
    torch.testing.assert_close(law, torch.tensor([[1.0, 0, 0, 0]]))


def test_greedy_is_one_hot_at_the_greatest_logit() -> None:
    law = GREEDY.probs(logits())
    assert torch.equal(law.argmax(1), logits().argmax(1))
    assert torch.equal(law.sort(1).values[:, -2:], torch.tensor([0.0, 1.0]).expand(len(law), 2))


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
def test_a_row_with_a_nan_stays_nan_and_spares_the_others(sampling: Sampling) -> None:
    spoilt = logits(3)
    spoilt[1, 17] = torch.nan
    law = sampling.probs(spoilt)
    assert law[1].isnan().all()
    assert torch.equal(law[[0, 2]], sampling.probs(logits(3))[[0, 2]])


@pytest.mark.parametrize("scale", [1.0, 37.0, 1e-6])
@pytest.mark.parametrize(
    "law", [[0.5, 0.3, 0.1, 0.06, 0.03, 0.01], [1, 1, 1, 1], [0.001, 0.999], [0, 0.25, 0, 0.75]]
)
def test_draws_are_distributed_as_the_law(law: list[float], scale: float) -> None:
    source, wanted = generator(1), torch.tensor(law)
    drawn = [int(draw(wanted * scale, source)) for _ in range(10_000)]
    assert p_value(frequencies(drawn, len(law)), wanted) > LIKELY


def test_successive_draws_are_independent() -> None:
    source, law = generator(2), torch.tensor([0.5, 0.3, 0.2])
    pairs = [3 * int(draw(law, source)) + int(draw(law, source)) for _ in range(10_000)]
    assert p_value(frequencies(pairs, 9), torch.outer(law, law)) > LIKELY


def test_tokens_rarer_than_float32_noise_are_not_drawn_too_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch's portable generator, which is exactly 0 once in 2**24 float32 numbers; the one in MKL
    # hides that
    def portable(self: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return self.copy_(
            -torch.rand(self.shape, dtype=self.dtype, generator=generator).neg_().log1p_()
        )

    monkeypatch.setattr(torch.Tensor, "exponential_", portable)
    law, source = torch.full((2**16,), 2.0**-40), generator(3)
    law[0] = 1
    # a rare one comes up once in 2**24 draws, not in 2**8
    assert all(int(draw(law, source)) == 0 for _ in range(2_000))


@pytest.mark.cuda(standin=False)
def test_tokens_rarer_than_float32_noise_are_not_drawn_too_seldom() -> None:
    # 2**18 tokens of 2**-25 each: float32 noise on a GPU is never below 2**-24, and draws less than
    # half of them
    law = torch.full((2**18 + 1,), 2.0**-25, device="cuda")
    law[0] = 1 - 2.0**-7
    source = torch.Generator("cuda").manual_seed(3)
    common = int(sum(draw(law, source) == 0 for _ in range(30_000)))
    assert (
        p_value(torch.tensor([common, 30_000 - common]), torch.tensor([1 - 2.0**-7, 2.0**-7]))
        > LIKELY
    )


@pytest.mark.parametrize("noise", [0.0, 1e-30, 800.0])
def test_a_token_of_no_probability_is_never_drawn(
    noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the extremes of the noise, which no seed would show: 0 / 0 is NaN, and argmax prefers a NaN
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, generator: self.fill_(noise))
    assert int(draw(torch.tensor([0.0, 0, 1e-38, 0]), generator())) == 2


def test_one_seed_gives_one_sequence_of_draws() -> None:
    law = logits(1)[0].softmax(0)
    first, second = (
        [int(draw(law, source)) for _ in range(50)] for source in (generator(4), generator(4))
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
    ],
)
def test_choices_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(TierForceError, match="must be"):
        Sampling(**{name: value})
