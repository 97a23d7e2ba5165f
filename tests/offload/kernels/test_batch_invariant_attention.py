"""A row's attention does not depend on what came with it, nor on how its keys were cut up."""

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
    source = torch.Generator().manual_seed(tokens)
    kv = torch.randn(2, HEADS, tokens, DIM, generator=source).to(dtype)
    return kv, torch.randn(tokens, HEADS * GROUPS, DIM, generator=source).to(dtype)


def attend(kv: Tensor, q: Tensor, start: int, end: int, *cuts: int) -> Tensor:
    bounds = [0, *cuts, end]
    parts = [kv[:, :, a:b] for a, b in pairwise(bounds)]
    return batch_invariant_attention(q[start:end], parts, ByteCounters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "end", [3, ROW_BLOCK, 100, KEY_BLOCK, KEY_BLOCK + 1, KEY_BLOCK + 37, 2 * KEY_BLOCK + 5]
)
def test_it_is_attention(end: int, dtype: torch.dtype) -> None:
    kv, q = kv_and_queries(end, dtype)
    start = max(0, end - 19)
    wide = kv.float()
    wanted, _ = partial_attention(
        q[start:].float(), wide[0].transpose(0, 1), wide[1].transpose(0, 1), True
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(attend(kv, q, start, end).float(), wanted, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("end", [90, KEY_BLOCK + 3, 2 * KEY_BLOCK + 20])
def test_a_row_is_the_same_in_every_company(end: int, dtype: torch.dtype) -> None:
    kv, q = kv_and_queries(end, dtype)
    first = end - 60
    alone = torch.cat([attend(kv, q, at, at + 1) for at in range(first, end)])
    for rows in (2, 7, ROW_BLOCK, 33, 60):
        for start in range(first, end - rows + 1, 5):
            found = attend(kv, q, start, start + rows)
            assert torch.equal(found, alone[start - first : start - first + rows])
    # wherever prefixes end, and recent tokens begin
    for cuts in ((first - 1,), (17, first), (first - 30, first - 3, first), (0, first)):
        assert torch.equal(attend(kv, q, first, end, *cuts), alone)
    # and head by head
    by_head = [
        attend(kv[:, head, None], q[:, head * GROUPS : (head + 1) * GROUPS], first, end)
        for head in range(HEADS)
    ]
    assert torch.equal(torch.cat(by_head, dim=1), alone)
    # whatever stands in memory behind the last token
    padded = torch.cat((kv, torch.full((2, HEADS, 50, DIM), torch.nan, dtype=dtype)), dim=2)
    found = batch_invariant_attention(q[first:], [padded[:, :, :end]], ByteCounters())
    assert torch.equal(found, alone)


def test_bytes_are_counted() -> None:
    kv, q = kv_and_queries(300, torch.float32)
    traffic = ByteCounters()
    block = kv.nbytes // 300 * KEY_BLOCK  # which is read with every block of rows
    batch_invariant_attention(q[-3:], [kv[:, :, :100], kv[:, :, 100:]], traffic)
    assert traffic.attended == block
    batch_invariant_attention(q[-13:], [kv], traffic)
    assert traffic.attended == 4 * block
