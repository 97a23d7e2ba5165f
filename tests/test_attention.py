"""partial_attention against plain arithmetic; merge against attention over the whole."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch
from reference import reference_attention
from torch import Tensor

from offload import attention, merge, partial_attention

HEADS = [(4, 4), (8, 2), (6, 3)]  # query heads, KV heads
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of out, in units of values around 1
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
heads = pytest.mark.parametrize("heads", HEADS)
rows = pytest.mark.parametrize("rows", [1, 2, 17])


def draw(rows: int, keys: int, heads: tuple[int, int], dtype: torch.dtype, device: str = "cpu", dim: int = 16) -> list[Tensor]:
    """q, k, v, with k and v views of head-major storage, as caches hand them over."""
    generator = torch.Generator().manual_seed(rows * 1000 + keys)
    q = torch.randn(rows, heads[0], dim, generator=generator) * 2
    kv = torch.randn(2, heads[1], keys + 5, dim, generator=generator)[:, :, :keys]
    q, kv = q.to(device, dtype), kv.to(device, dtype)
    return [q, kv[0].transpose(0, 1), kv[1].transpose(0, 1)]


def agree(found: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    (out, lse), (want, want_lse) = found, reference_attention(q, k, v, causal)
    assert (out.dtype, lse.dtype, out.shape, lse.shape) == (q.dtype, torch.float32, q.shape, q.shape[:2])
    torch.testing.assert_close(out.float(), want, atol=TOLERANCE[q.dtype], rtol=TOLERANCE[q.dtype])
    torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=1e-4)


@dtypes
@heads
@rows
@pytest.mark.parametrize("keys", [1, 17, 300])
def test_all_keys_visible(dtype: torch.dtype, heads: tuple[int, int], rows: int, keys: int) -> None:
    q, k, v = draw(rows, keys, heads, dtype)
    agree(partial_attention(q, k, v, causal=False), q, k, v, causal=False)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    agree(partial_attention(q, k, v, causal=False), q, k, v, causal=False)


@dtypes
@heads
@rows
@pytest.mark.parametrize("prefix", [0, 1, 200])
def test_causal_is_bottom_right(dtype: torch.dtype, heads: tuple[int, int], rows: int, prefix: int) -> None:
    q, k, v = draw(rows, prefix + rows, heads, dtype)
    agree(partial_attention(q, k, v, causal=True), q, k, v, causal=True)


@dtypes
@rows
def test_no_keys(dtype: torch.dtype, rows: int) -> None:
    q, k, v = draw(rows, 0, (8, 2), dtype)
    out, lse = partial_attention(q, k, v, causal=False)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((rows, 8), -torch.inf))


@dtypes
@heads
@rows
def test_merge_of_any_split_is_the_whole(dtype: torch.dtype, heads: tuple[int, int], rows: int) -> None:
    q, k, v = draw(rows, 120 + rows, heads, dtype)
    generator = torch.Generator().manual_seed(rows)
    for count in (1, 2, 5):
        cuts = sorted(torch.randint(121, (count,), generator=generator).tolist())
        bounds = [0, *cuts, cuts[-1], len(k)]  # with one empty part at least; the last holds the rows' own keys
        parts = [partial_attention(q, k[start:end], v[start:end], causal=end == len(k)) for start, end in pairwise(bounds)]
        agree(merge(parts), q, k, v, causal=True)


def test_merge_of_disordered_parts_is_the_whole() -> None:
    q, k, v = draw(5, 90, (6, 3), torch.float32)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0)).split([1, 40, 9, 40])
    agree(merge([partial_attention(q, k[part], v[part], causal=False) for part in order]), q, k, v, causal=False)


def test_merge_of_empty_parts_is_empty() -> None:
    q, k, v = draw(3, 0, (4, 2), torch.float32)
    out, lse = merge([partial_attention(q, k, v, causal=False)] * 3)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((3, 4), -torch.inf))


def test_merge_survives_distant_magnitudes() -> None:
    q, k, v = draw(2, 64, (2, 2), torch.float32)
    k[:32] *= 200  # scores in the hundreds on one side
    agree(merge([partial_attention(q, k[:32], v[:32], False), partial_attention(q, k[32:], v[32:], False)]), q, k, v, False)


def test_numbers_that_are_none_stay_so() -> None:
    q, k, v = draw(2, 64, (2, 2), torch.float32)
    v[3] = torch.nan
    out, _ = merge([partial_attention(q, k[:32], v[:32], False), partial_attention(q, k[32:], v[32:], False)])
    assert out.isnan().any(2).all()


CUDA_KERNELS = [
    pytest.param(attention._cuda_flash, torch.float16, id="flash-float16"),
    pytest.param(attention._cuda_flash, torch.bfloat16, id="flash-bfloat16"),
    pytest.param(attention._cuda_float32, torch.float32, id="efficient-float32"),
    *(
        pytest.param(
            attention._flash_attn,
            dtype,
            id=f"flash_attn-{dtype}",
            marks=pytest.mark.skipif(not find_spec("flash_attn"), reason="flash-attn is not installed"),
        )
        for dtype in (torch.float16, torch.bfloat16)
    ),
]


@pytest.mark.cuda
@heads
@rows
@pytest.mark.parametrize(("kernel", "dtype"), CUDA_KERNELS)
@pytest.mark.parametrize("dim", [64, 128])
def test_cuda_kernels(kernel: attention.Kernel, dtype: torch.dtype, heads: tuple[int, int], rows: int, dim: int) -> None:
    for prefix in (0, 1, 500):
        q, k, v = draw(rows, prefix + rows, heads, dtype, "cuda", dim)
        agree(kernel(q, k, v, False), q, k, v, causal=False)
        if rows > 1:
            agree(kernel(q, k, v, True), q, k, v, causal=True)
        agree(partial_attention(q, k, v, True), q, k, v, causal=True)
