"""A row's attention does not depend on the other rows, nor on how its keys are split."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from offload.attention import partial_attention
from offload.kernels.batch_invariant_attention import batch_invariant_attention
from offload.kernels.batch_invariant_shape import KEY_BLOCK, ROW_BLOCK
from offload.traffic import ByteCounters

HEADS, GROUPS, DIM = 2, 3, 32


def kv_and_queries(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    kv = torch.randn(2, HEADS, tokens, DIM, generator=generator).to(dtype)
    return kv, torch.randn(tokens, HEADS * GROUPS, DIM, generator=generator).to(dtype)


def attend(kv: Tensor, q: Tensor, start: int, end: int, *splits: int) -> Tensor:
    bounds = [0, *splits, end]
    parts = [kv[:, :, a:b] for a, b in pairwise(bounds)]
    out, lse = batch_invariant_attention(q[start:end], parts, ByteCounters())
    return torch.cat((out.float(), lse[..., None]), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "end", [3, ROW_BLOCK, 100, KEY_BLOCK, KEY_BLOCK + 1, KEY_BLOCK + 37, 2 * KEY_BLOCK + 5]
)
def test_result_is_causal_attention(end: int, dtype: torch.dtype) -> None:
    kv, q = kv_and_queries(end, dtype)
    start = max(0, end - 19)
    keys, values = kv.float().transpose(1, 2)
    out, lse = partial_attention(q[start:].float(), keys, values, True)
    expected = torch.cat((out, lse[..., None]), dim=-1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(attend(kv, q, start, end).float(), expected, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("end", [90, KEY_BLOCK + 3, 2 * KEY_BLOCK + 20])
def test_result_of_a_row_does_not_depend_on_other_rows(end: int, dtype: torch.dtype) -> None:
    kv, q = kv_and_queries(end, dtype)
    first = end - 60
    alone = torch.cat([attend(kv, q, row, row + 1) for row in range(first, end)])
    for rows in (2, 7, ROW_BLOCK, 33, 60):
        for start in range(first, end - rows + 1, 5):
            actual = attend(kv, q, start, start + rows)
            assert torch.equal(actual, alone[start - first : start - first + rows])
    # with keys split anywhere
    for splits in ((first - 1,), (17, first), (first - 30, first - 3, first), (0, first)):
        assert torch.equal(attend(kv, q, first, end, *splits), alone)
    # head by head: vectors of the processor end elsewhere, since GROUPS is odd
    by_head = [
        attend(kv[:, head, None], q[:, head * GROUPS : (head + 1) * GROUPS], first, end)
        for head in range(HEADS)
    ]
    assert torch.equal(torch.cat(by_head, dim=1), alone)
    # with NaNs in memory after the last token
    padded = torch.cat((kv, torch.full((2, HEADS, 50, DIM), torch.nan, dtype=dtype)), dim=2)
    assert torch.equal(attend(padded, q, first, end), alone)


def test_bytes_are_counted() -> None:
    kv, q = kv_and_queries(300, torch.float32)
    traffic = ByteCounters()
    block = kv.nbytes // 300 * KEY_BLOCK  # bytes read for every block of rows
    batch_invariant_attention(q[-3:], [kv[:, :, :100], kv[:, :, 100:]], traffic)
    assert traffic.attended == block
    batch_invariant_attention(q[-13:], [kv], traffic)
    assert traffic.attended == 4 * block
