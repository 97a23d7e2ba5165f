"""The output of rejection sampling follows the target's distribution for any draft."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decoding.speculation.rejection_sampler import Draft, rejection_sample, residual_probs
from decoding.speculation.sampling import draw
from offload.errors import InvalidRequestError
from support.distributions import LIKELY, frequencies, p_value
from support.slow import slow_except

VOCAB = 5
ROUNDS = 1_000
P = torch.tensor(
    [
        [0.4, 0.3, 0.2, 0.1, 0.0],
        [0.05, 0.05, 0.0, 0.1, 0.8],
        [0.2, 0.2, 0.2, 0.2, 0.2],
        [0.0, 0.5, 0.5, 0.0, 0.0],
    ]
)
DRAFTS = {
    "the target": P[:3],
    "uniform": torch.full((3, VOCAB), 1 / VOCAB),
    "nearly right": P[:3] * 0.9 + 0.1 / VOCAB,
    "reversed": P[:3].flip(1),
    "one token, likely": torch.eye(VOCAB)[[0, 4, 2]],
    "one token, unlikely": torch.eye(VOCAB)[[3, 0, 1]],
    "one token, impossible": torch.eye(VOCAB)[[4, 2, 0]],
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def propose(draft_probs: Tensor, source: torch.Generator) -> Draft:
    tokens = [draw(probs, source) for probs in draft_probs]
    return Draft(torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64), draft_probs)


def sample_rounds(draft_probs: Tensor, rounds: int, source: torch.Generator) -> list[list[int]]:
    """Return the tokens of each round: accepted ones, and the recovered or bonus token."""
    outputs = []
    for _ in range(rounds):
        draft = propose(draft_probs, source)
        accepted, next_token = rejection_sample(draft, P[: len(draft_probs) + 1], source)
        outputs.append([*draft.tokens[:accepted].tolist(), next_token])
    return outputs


@pytest.mark.parametrize("length", slow_except([1, 3], 1))
@pytest.mark.parametrize("name", DRAFTS)
def test_every_output_token_follows_the_target_distribution(name: str, length: int) -> None:
    outputs = sample_rounds(DRAFTS[name][:length], ROUNDS, generator(1))
    for position in range(length + 1):
        tokens = [output[position] for output in outputs if len(output) > position]
        assert p_value(frequencies(tokens, VOCAB), P[position]) > LIKELY


@pytest.mark.parametrize("name", ["uniform", "nearly right", "reversed"])
def test_output_tokens_are_independent(name: str) -> None:
    # the rows of P are independent, so two output tokens follow the product distribution
    pairs = [
        VOCAB * output[0] + output[1]
        for output in sample_rounds(DRAFTS[name], 2 * ROUNDS, generator(2))
        if len(output) > 1
    ]
    first = torch.minimum(P[0], DRAFTS[name][0])  # there is a second token if this is accepted
    assert p_value(frequencies(pairs, VOCAB**2), torch.outer(first, P[1])) > LIKELY


@pytest.mark.parametrize("name", DRAFTS)
def test_acceptance_rate_is_the_overlap_of_the_distributions(name: str) -> None:
    overlap = float(torch.minimum(P[0], DRAFTS[name][0]).sum())
    outputs = sample_rounds(DRAFTS[name][:1], ROUNDS, generator(3))
    accepted = sum(len(output) > 1 for output in outputs)
    counts = torch.tensor([accepted, ROUNDS - accepted])
    assert p_value(counts, torch.tensor([overlap, 1 - overlap]).clamp(0, 1)) > LIKELY


def test_recovered_tokens_are_sampled_from_the_residual() -> None:
    # q = (1, 0), p = (1/2, 1/2): sampling from p itself after a rejection, as the published middle
    # level does, would give token 0 three times out of four
    q, p = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    source, tokens = generator(4), torch.zeros(1, dtype=torch.int64)
    results = [rejection_sample(Draft(tokens, q), p, source) for _ in range(ROUNDS)]
    # only token 1 is in the residual
    assert all(next_token == 1 for accepted, next_token in results if not accepted)
    first = [0 if accepted else next_token for accepted, next_token in results]
    assert p_value(frequencies(first, 2), p[0]) > LIKELY


def test_with_an_empty_draft_the_target_is_sampled() -> None:
    source, empty = generator(5), Draft(torch.empty(0, dtype=torch.int64), torch.empty(0, 0))
    results = [rejection_sample(empty, P[:1], source) for _ in range(ROUNDS)]
    assert {accepted for accepted, _ in results} == {0}
    assert p_value(frequencies([token for _, token in results], VOCAB), P[0]) > LIKELY


def test_drafts_from_the_target_distribution_are_never_rejected() -> None:
    assert all(len(output) == 4 for output in sample_rounds(P[:3], ROUNDS, generator(6)))


def test_one_hot_distributions_accept_equal_tokens_and_recover_others() -> None:
    target, drafted = torch.eye(VOCAB)[[2, 0, 4, 1]], torch.tensor([2, 0, 3])
    assert rejection_sample(Draft(drafted, torch.eye(VOCAB)[drafted]), target, generator()) == (
        2,
        4,
    )


def test_an_empty_residual_falls_back_to_the_target() -> None:
    assert torch.equal(residual_probs(P[0], P[0]), P[0])
    # q > p everywhere, as rounding may have it
    assert torch.equal(residual_probs(P[0], P[0].clamp(min=0.1)), P[0])


NAN = torch.full((VOCAB,), torch.nan)


@pytest.mark.parametrize("row", range(4))
def test_nan_in_needed_target_probs_raises(row: int) -> None:
    broken = P.clone()
    broken[row] = NAN
    with pytest.raises(InvalidRequestError, match="NaN"):
        rejection_sample(propose(P[:3], generator()), broken, generator())


@pytest.mark.parametrize("row", range(3))
def test_nan_in_needed_draft_probs_raises(row: int) -> None:
    draft = propose(P[:3], generator())
    broken = P[:3].clone()
    broken[row] = NAN
    with pytest.raises(InvalidRequestError, match="NaN"):
        rejection_sample(Draft(draft.tokens, broken), P, generator())


def test_nan_after_a_rejected_token_is_ignored() -> None:
    target, drafted = torch.eye(VOCAB)[[2, 0, 4, 1]], torch.tensor([2, 3, 4])
    target[2:] = NAN
    assert rejection_sample(Draft(drafted, torch.eye(VOCAB)[drafted]), target, generator()) == (
        1,
        0,
    )
