"""What verification lets out follows the target's law, whatever was proposed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decoding.speculation.rejection_sampler import Draft, rejection_sample, residual_probs
from decoding.speculation.sampling import draw
from offload.errors import InvalidRequestError
from support.laws import LIKELY, frequencies, p_value

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
    "its own law": P[:3],
    "uniform": torch.full((3, VOCAB), 1 / VOCAB),
    "nearly right": P[:3] * 0.9 + 0.1 / VOCAB,
    "the other way round": P[:3].flip(1),
    "one token, likely": torch.eye(VOCAB)[[0, 4, 2]],
    "one token, unlikely": torch.eye(VOCAB)[[3, 0, 1]],
    "one token, impossible": torch.eye(VOCAB)[[4, 2, 0]],
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def propose(laws: Tensor, source: torch.Generator) -> Draft:
    tokens = [draw(law, source) for law in laws]
    return Draft(torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64), laws)


def let_out(laws: Tensor, rounds: int, source: torch.Generator) -> list[list[int]]:
    """The tokens of each round: those of the draft that stand, and the one after them."""
    texts = []
    for _ in range(rounds):
        draft = propose(laws, source)
        accepted, following = rejection_sample(draft, P[: len(laws) + 1], source)
        texts.append([*draft.tokens[:accepted].tolist(), following])
    return texts


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("name", DRAFTS)
def test_every_token_let_out_follows_the_target_law(name: str, length: int) -> None:
    texts = let_out(DRAFTS[name][:length], ROUNDS, generator(1))
    for position in range(length + 1):
        there = [text[position] for text in texts if len(text) > position]
        assert p_value(frequencies(there, VOCAB), P[position]) > LIKELY


@pytest.mark.parametrize("name", ["uniform", "nearly right", "the other way round"])
def test_a_token_does_not_depend_on_the_one_before(name: str) -> None:
    # P's rows do not, so neither may what comes out: two tokens of a text are a draw of the product
    # law
    pairs = [
        VOCAB * text[0] + text[1]
        for text in let_out(DRAFTS[name], 2 * ROUNDS, generator(2))
        if len(text) > 1
    ]
    first = torch.minimum(P[0], DRAFTS[name][0])  # a second token is there if the first one stood
    assert p_value(frequencies(pairs, VOCAB**2), torch.outer(first, P[1])) > LIKELY


@pytest.mark.parametrize("name", DRAFTS)
def test_acceptance_is_the_overlap_of_the_laws(name: str) -> None:
    overlap = float(torch.minimum(P[0], DRAFTS[name][0]).sum())
    stood = sum(len(text) > 1 for text in let_out(DRAFTS[name][:1], ROUNDS, generator(3)))
    assert (
        p_value(
            torch.tensor([stood, ROUNDS - stood]), torch.tensor([overlap, 1 - overlap]).clamp(0, 1)
        )
        > LIKELY
    )


def test_the_example_the_published_middle_level_gets_wrong() -> None:
    # q = (1, 0), p = (1/2, 1/2): redrawing from p itself would give token 0 three times out of four
    source, q, p = generator(4), torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    tokens = torch.zeros(1, dtype=torch.int64)
    found = [rejection_sample(Draft(tokens, q), p, source) for _ in range(ROUNDS)]
    # the residual has token 1 alone
    assert all(following == 1 for accepted, following in found if not accepted)
    first = [0 if accepted else following for accepted, following in found]
    assert p_value(frequencies(first, 2), p[0]) > LIKELY


def test_an_empty_draft_is_a_draw_from_the_target() -> None:
    source, nothing = generator(5), Draft(torch.empty(0, dtype=torch.int64), torch.empty(0, 0))
    found = [rejection_sample(nothing, P[:1], source) for _ in range(ROUNDS)]
    assert {accepted for accepted, _ in found} == {0}
    assert p_value(frequencies([following for _, following in found], VOCAB), P[0]) > LIKELY


def test_the_target_own_law_is_never_rejected() -> None:
    assert all(len(text) == 4 for text in let_out(P[:3], ROUNDS, generator(6)))


def test_greedy_laws_accept_what_agrees_and_correct_what_does_not() -> None:
    target, drafted = torch.eye(VOCAB)[[2, 0, 4, 1]], torch.tensor([2, 0, 3])
    assert rejection_sample(Draft(drafted, torch.eye(VOCAB)[drafted]), target, generator()) == (
        2,
        4,
    )


def test_a_residual_lost_to_rounding_falls_back_to_the_law() -> None:
    assert torch.equal(residual_probs(P[0], P[0]), P[0])
    # q above p everywhere, as rounding can leave it
    assert torch.equal(residual_probs(P[0], P[0].clamp(min=0.1)), P[0])


NAN = torch.full((VOCAB,), torch.nan)


@pytest.mark.parametrize("row", range(4))
def test_a_nan_in_a_target_law_that_is_needed_raises(row: int) -> None:
    spoilt = P.clone()
    spoilt[row] = NAN
    with pytest.raises(InvalidRequestError, match="not numbers"):
        rejection_sample(propose(P[:3], generator()), spoilt, generator())


@pytest.mark.parametrize("row", range(3))
def test_a_nan_in_a_draft_law_that_is_needed_raises(row: int) -> None:
    draft = propose(P[:3], generator())
    spoilt = P[:3].clone()
    spoilt[row] = NAN
    with pytest.raises(InvalidRequestError, match="not numbers"):
        rejection_sample(Draft(draft.tokens, spoilt), P, generator())


def test_a_nan_behind_a_rejected_token_is_of_no_consequence() -> None:
    target, drafted = torch.eye(VOCAB)[[2, 0, 4, 1]], torch.tensor([2, 3, 4])
    target[2:] = NAN
    assert rejection_sample(Draft(drafted, torch.eye(VOCAB)[drafted]), target, generator()) == (
        1,
        0,
    )
