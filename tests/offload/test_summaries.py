"""Tangent summaries: exact where they claim to be, and everywhere the formula of `tangents`, token
by token.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offload.layout import ceil_div
from offload.selection import ObservedRows
from offload.summaries import biases, tangents
from support.reference import bias_by_hand, reference_attention, tangent_by_hand

HEADS, GROUPS, DIM = 3, 2, 8
NONE = torch.empty(HEADS, 0, dtype=torch.int64)
# whole, shorter, one, each
sizes = pytest.mark.parametrize(
    ("tokens", "size"), [(48, 16), (41, 16), (7, 16), (24, 1), (33, 32)]
)


def draw(rows: int, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """q (T, Hq, D) and a prefix (2, Hkv, N, D)."""
    return (torch.randn(rows, HEADS * GROUPS, DIM) * 2).to(dtype), torch.randn(
        2, HEADS, tokens, DIM
    ).to(dtype)


def summarise(q: Tensor, kv: Tensor, left_out: Tensor, size: int) -> tuple[Tensor, Tensor]:
    seen = ObservedRows(q, kv[0], 8)
    seen.leave_out(left_out, 1)
    summary = tangents(seen, kv, size)
    return summary, biases(seen, summary[0], size)


def attention(q: Tensor, kv: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return reference_attention(q, kv[0].transpose(0, 1), kv[1].transpose(0, 1), False, bias)


@sizes
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("left_out", [0, 3])
def test_the_formula_token_by_token(rows: int, tokens: int, size: int, left_out: int) -> None:
    q, kv = draw(rows, tokens)
    out = torch.stack([torch.randperm(tokens)[:left_out] for _ in range(HEADS)])
    found, bias = summarise(q, kv, out, size)
    assert (found.shape, bias.shape) == (
        (2, HEADS, ceil_div(tokens, size), DIM),
        (HEADS, ceil_div(tokens, size)),
    )
    assert bias.dtype == torch.float32
    for head in range(HEADS):
        queries = q[:, head * GROUPS : (head + 1) * GROUPS].flatten(0, 1)
        for index, chunk in enumerate(torch.arange(tokens).split(size)):
            rest = [token for token in chunk.tolist() if token not in out[head].tolist()]
            if not rest:
                assert bias[head, index] == -torch.inf
                # for a later choice to weigh
                torch.testing.assert_close(found[:, head, index], kv[:, head, chunk].mean(1))
                continue
            key, value = tangent_by_hand(queries, kv[0, head, rest], kv[1, head, rest])
            wanted = bias_by_hand(queries, kv[0, head, rest], key)
            torch.testing.assert_close(found[0, head, index], key, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(found[1, head, index], value, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(bias[head, index], wanted, atol=1e-4, rtol=1e-5)


@sizes
def test_identical_keys_are_exact_for_any_query(tokens: int, size: int) -> None:
    q, kv = draw(4, tokens)
    kv[0] = torch.cat([part[:, :1].expand_as(part) for part in kv[0].split(size, dim=1)], dim=1)
    found, bias = summarise(q, kv, NONE, size)
    later = torch.randn(9, HEADS * GROUPS, DIM) * 5
    torch.testing.assert_close(
        attention(later, found, bias), attention(later, kv), atol=1e-4, rtol=1e-4
    )


@sizes
def test_one_row_is_exact_at_itself(tokens: int, size: int) -> None:
    q, kv = draw(1, tokens)
    q = q[:, ::GROUPS]  # one query a head: with two the expansion is around neither
    found, bias = summarise(q, kv, NONE, size)
    torch.testing.assert_close(attention(q, found, bias), attention(q, kv), atol=1e-5, rtol=1e-5)
    for index in range(found.shape[2]):  # and so is each chunk by itself, mass and output
        one = slice(index, index + 1)
        whole = attention(q, kv[:, :, index * size : (index + 1) * size])
        torch.testing.assert_close(
            attention(q, found[:, :, one], bias[:, one]), whole, atol=1e-5, rtol=1e-5
        )


def test_a_tangent_errs_in_the_second_order() -> None:
    q, kv = draw(1, 64)
    q, away = q[:, ::GROUPS], torch.randn(1, HEADS, DIM)
    found, bias = summarise(q, kv, NONE, 64)

    def error(step: float) -> Tensor:
        # of the mass, in logarithms
        return (
            attention(q + step * away, found, bias)[1] - attention(q + step * away, kv)[1]
        ).abs()

    assert (error(0.5) > 1e-3).all()
    assert (error(0.05) < 0.03 * error(0.5)).all()  # a tenth as far is a hundredth of the error
    # convex: a tangent lies below
    assert (attention(q + away, found, bias)[1] <= attention(q + away, kv)[1]).all()


def test_selected_and_summarised_tokens_together_are_the_whole() -> None:
    q, kv = draw(1, 50)
    q = q[:, ::GROUPS]
    out = torch.stack([torch.randperm(50)[:20] for _ in range(HEADS)])
    found, bias = summarise(q, kv, out, 16)
    kept = torch.stack([kv[:, head, out[head]] for head in range(HEADS)], dim=1)
    together, weights = (
        torch.cat((kept, found), dim=2),
        torch.cat((torch.zeros(HEADS, 20), bias), dim=1),
    )
    torch.testing.assert_close(
        attention(q, together, weights), attention(q, kv), atol=1e-5, rtol=1e-5
    )


def test_chunks_wholly_left_out_weigh_nothing() -> None:
    q, kv = draw(3, 41)
    out = torch.tensor([[*range(16, 32)], [*range(16)], [*range(25, 41)]])
    found, bias = summarise(q, kv, out, 16)
    empty = torch.tensor([[False, True, False], [True, False, False], [False, False, True]])
    assert torch.equal(bias == -torch.inf, empty)  # of the last head's second chunk 9 tokens remain
    assert found.isfinite().all()
    everything = torch.arange(41).expand(HEADS, -1)
    assert torch.equal(summarise(q, kv, everything, 16)[1], torch.full((HEADS, 3), -torch.inf))


@sizes
def test_some_chunks_are_summarised_as_all_are(tokens: int, size: int) -> None:
    q, kv = draw(3, tokens)
    seen = ObservedRows(q, kv[0], 8)
    whole = tangents(seen, kv, size)
    for part in (slice(0, 1), slice(1, None), slice(1, 2), slice(0, None, 2)):
        if range(whole.shape[2])[part]:
            torch.testing.assert_close(tangents(seen, kv, size, part), whole[:, :, part])


@sizes
def test_any_key_gets_the_mass_it_stands_for(tokens: int, size: int) -> None:
    """A summary of an older choice: at the rows themselves its key weighs, in the mean of
    logarithms, what the chunk does.
    """
    q, kv = draw(5, tokens)
    q = q[:, ::GROUPS]
    seen, old = ObservedRows(q, kv[0], 8), torch.randn(HEADS, ceil_div(tokens, size), DIM)
    bias = biases(seen, old, size)
    for head in range(HEADS):
        for index, chunk in enumerate(torch.arange(tokens).split(size)):
            scores = q[:, head] @ kv[0, head, chunk].T * DIM**-0.5  # (T, S)
            mine = q[:, head] @ old[head, index] * DIM**-0.5 + bias[head, index]
            torch.testing.assert_close(
                mine.mean(), scores.logsumexp(1).mean(), atol=1e-4, rtol=1e-5
            )


def test_chunks_are_left_out_whole() -> None:
    q, kv = draw(3, 41)
    by_chunk, by_token = ObservedRows(q, kv[0], 8), ObservedRows(q, kv[0], 8)
    chunks = torch.tensor([[0, 4], [2, 3], [1, 0]])  # of 8 tokens; the last token belongs to none
    by_chunk.leave_out(chunks, 8)
    by_token.leave_out((chunks[..., None] * 8 + torch.arange(8)).flatten(1), 1)
    assert torch.equal(by_chunk.weights, by_token.weights)
    assert (by_chunk.weights == 0).sum() == 3 * len(by_chunk.q[0]) * 16


# one row of three whose weights vanish, or all of them
@pytest.mark.parametrize("far", [slice(0, 1), slice(0, 3)])
def test_rows_whose_weights_underflow_have_no_say(far: slice) -> None:
    q, kv = torch.zeros(3, HEADS, DIM), torch.randn(2, HEADS, 32, DIM)
    kv[0, :, :16, 0], kv[0, :, 16:, 0] = 1.0, -1.0
    q[far, :, 0] = 400 * DIM**0.5  # the second chunk's scores lie 800 below the first's
    q[:, :, 1] = 1.0
    found, bias = summarise(q, kv, NONE, 16)
    assert found.isfinite().all()
    assert not bias.isnan().any()
    near = q[far.stop :]
    if not len(near):
        assert (bias[:, 1] == -torch.inf).all()
        return
    wanted, weight = summarise(near, kv, NONE, 16)  # the others alone
    torch.testing.assert_close(found[:, :, 1], wanted[:, :, 1])
    torch.testing.assert_close(bias[:, 1], weight[:, 1])


def test_scores_in_the_thousands_overflow_nothing() -> None:
    q, kv = draw(4, 48)
    found, bias = summarise(q * 1e3, kv, NONE, 16)
    assert found.isfinite().all()
    assert not bias.isnan().any()
    assert (bias < torch.inf).all()


@sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_a_slot_may_lie_apart(tokens: int, size: int, dtype: torch.dtype) -> None:
    q, kv = draw(5, tokens, dtype)
    slot = torch.full((2, HEADS + 1, tokens + 9, DIM), torch.nan, dtype=dtype)
    view = slot[:, 1:, 4 : tokens + 4].copy_(kv)
    assert not view.is_contiguous()
    out = torch.stack([torch.randperm(tokens)[:3] for _ in range(HEADS)])
    for found, wanted in zip(
        summarise(q, view, out, size), summarise(q, kv, out, size), strict=True
    ):
        assert torch.equal(found, wanted)


def test_bfloat16_is_near_float32() -> None:
    q, kv = draw(5, 48, torch.bfloat16)
    found, bias = summarise(q, kv, NONE, 16)
    wanted, weight = summarise(q.float(), kv.float(), NONE, 16)
    assert (found.dtype, bias.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(found.float(), wanted, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(bias, weight, atol=6e-2, rtol=2e-2)
