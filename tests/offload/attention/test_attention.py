"""partial_attention against a reference; merge against attention over all keys."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from offload import attention
from offload.attention import cpu, cuda, masked_attention, partial_attention
from offload.attention.cuda import cuda_flash, cuda_float32, flash_attn_kernel, matmul_op
from offload.attention.folding import Kernel, Partial, attend_masked, merge
from offload.layout import ceil_div
from support.reference import reference_attention
from support.slow import slow_except

HEADS = [(4, 4), (8, 2), (6, 3)]  # query heads, KV heads
# tolerance of out, for values around 1
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
heads = pytest.mark.parametrize("heads", HEADS)
rows = pytest.mark.parametrize("rows", [1, 2, 17])


def draw_mask(rows: int, keys: int, device: str = "cpu") -> Tensor:
    """Return a mask (T, N) of a third of the keys, different in each row, but never the first."""
    is_masked = (torch.arange(keys) + torch.arange(rows)[:, None]) % 3 == 1
    is_masked[:, 0] = False
    return torch.zeros(rows, keys).masked_fill(is_masked, -torch.inf).to(device)


def draw(
    rows: int,
    keys: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: str = "cpu",
    dim: int = 16,
) -> list[Tensor]:
    """Return q, k, v, with k and v views of head-major storage, as caches pass them."""
    generator = torch.Generator().manual_seed(rows * 1000 + keys)
    q = torch.randn(rows, heads[0], dim, generator=generator) * 2
    kv = torch.randn(2, heads[1], keys + 5, dim, generator=generator)[:, :, :keys]
    q, kv = q.to(device, dtype), kv.to(device, dtype)
    return [q, kv[0].transpose(0, 1), kv[1].transpose(0, 1)]


def agree(
    actual: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    mask: Tensor | None = None,
) -> None:
    out, lse = actual
    expected, expected_lse = reference_attention(q, k, v, causal, mask)
    assert (out.dtype, lse.dtype, out.shape, lse.shape) == (
        q.dtype,
        torch.float32,
        q.shape,
        q.shape[:2],
    )
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-4)


@dtypes
@heads
@rows
@pytest.mark.parametrize("keys", [1, 17, 300])
def test_all_keys_visible(dtype: torch.dtype, heads: tuple[int, int], rows: int, keys: int) -> None:
    q, k, v = draw(rows, keys, heads, dtype)
    agree(partial_attention(q, k, v, causal=False), q, k, v, causal=False)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    agree(partial_attention(q, k, v, causal=False), q, k, v, causal=False)


@heads
@pytest.mark.parametrize("rows", [1, 33])
def test_last_block_of_a_single_row(heads: tuple[int, int], rows: int) -> None:
    q, k, v = draw(rows, 301, heads, torch.bfloat16)
    agree(cpu.attend(q, k, v, False), q, k, v, causal=False)
    mask = draw_mask(rows, len(k))
    by_head = mask.repeat_interleave(heads[0] // heads[1], 0)
    agree(attend_masked(cpu.op, q, k, v, by_head), q, k, v, False, mask)


@heads
@pytest.mark.parametrize("rows", slow_except([65, 100, 128, 300], 0, -1))
@pytest.mark.parametrize("prefix", [0, 7, 600])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_of_many_rows_does_not_change_the_result(
    heads: tuple[int, int], rows: int, prefix: int, causal: bool
) -> None:
    q, k, v = draw(rows, prefix + rows, heads, torch.bfloat16)
    agree(partial_attention(q, k, v, causal), q, k, v, causal)


def test_prompts_of_any_length_use_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = set()

    def recorder(
        q: Tensor, k: Tensor, v: Tensor, *_: object, attn_mask: Tensor | None = None
    ) -> Partial:
        shapes.add((q.shape[2], k.shape[2]))
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    monkeypatch.setattr(cpu, "_flash", recorder)
    for rows in range(65, 641, 3):
        cpu.attend(*draw(rows, 512 + rows, (1, 1), torch.bfloat16), True)
    sizes = range(128, 641, 64)
    assert shapes == {(size, 512) for size in sizes} | {(size, size) for size in sizes}


def test_kernels_are_selected_once() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert attention.backend("cpu", dtype) is attention.backend("cpu", dtype)


@dtypes
@heads
@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_keys_are_split_over_idle_threads(
    dtype: torch.dtype,
    heads: tuple[int, int],
    rows: int,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part_counts: list[int] = []

    def recorder(parts: list[Partial]) -> Partial:
        part_counts.append(len(parts))
        return merge(parts)

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(cpu, "_KEYS_PER_BLOCK", 30)
    monkeypatch.setattr(cpu, "merge", recorder)
    q, k, v = draw(rows, 301, heads, dtype)
    agree(partial_attention(q, k, v, causal=False), q, k, v, causal=False)
    parts = {2: {4: 1, 2: 1, 3: 1}, 3: {4: 1, 2: 3, 3: 1}, 8: {4: 2, 2: 4, 3: 8}}[threads][heads[1]]
    if heads[1] * ceil_div(ceil_div(rows * heads[0], heads[1]), 32) < 4 * threads:
        # nothing is merged if there is one part
        remaining = 301 % parts > 0  # an extra part
        assert (part_counts or [1]) == [parts + remaining]


def test_keys_are_not_split_with_enough_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(
        cpu, "merge", lambda parts: parts[0] if len(parts) == 1 else pytest.fail("keys were split")
    )
    q, k, v = draw(400, 2000, (1, 1), torch.float32)
    agree(partial_attention(q, k, v, causal=False), q, k, v, causal=False)


@pytest.mark.parametrize(("heads", "count"), [((3, 3), 1), ((1, 1), 2)])
def test_few_keys_are_split_only_if_a_thread_has_no_head(
    heads: tuple[int, int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    part_counts: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cpu, "merge", lambda parts: part_counts.append(len(parts)) or merge(parts))
    q, k, v = draw(1, 2000, heads, torch.float32)
    agree(partial_attention(q, k, v, causal=False), q, k, v, causal=False)
    assert (part_counts or [1]) == [count]


@dtypes
@heads
@rows
@pytest.mark.parametrize("prefix", [0, 1, 200])
def test_causal_alignment_is_bottom_right(
    dtype: torch.dtype, heads: tuple[int, int], rows: int, prefix: int
) -> None:
    q, k, v = draw(rows, prefix + rows, heads, dtype)
    agree(partial_attention(q, k, v, causal=True), q, k, v, causal=True)


@dtypes
@heads
@rows
# 1200 keys: more than one block of the kernel
@pytest.mark.parametrize("keys", [18, 300, 1200])
def test_mask_selects_the_keys_of_each_row(
    dtype: torch.dtype, heads: tuple[int, int], rows: int, keys: int
) -> None:
    q, k, v = draw(rows, keys, heads, dtype)
    for mask in (draw_mask(rows, keys), torch.zeros(rows, keys)):
        agree(masked_attention(q, k, v, mask), q, k, v, False, mask)


@dtypes
@rows
def test_masked_keys_do_not_affect_the_result(dtype: torch.dtype, rows: int) -> None:
    q, k, v = draw(rows, 1300, (8, 2), dtype)
    mask = torch.zeros(rows, len(k))
    mask[:, 3:1290] = -torch.inf  # includes whole blocks of the kernel
    visible = [*range(3), *range(1290, len(k))]
    agree(masked_attention(q, k, v, mask), q, k[visible], v[visible], False)


@dtypes
@heads
@rows
def test_masked_matmul_matches_the_fused_kernel(
    dtype: torch.dtype, heads: tuple[int, int], rows: int
) -> None:
    """This is the operator of GPUs; on a CPU its scores are rounded to q's dtype."""
    q, k, v = draw(rows, 90 + rows, heads, dtype)
    mask = draw_mask(rows, len(k)).repeat_interleave(heads[0] // heads[1], 0)
    out, lse = attend_masked(matmul_op, q, k, v, mask)
    expected, expected_lse = attend_masked(cpu.op, q, k, v, mask)
    tolerance = 2e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=tolerance, rtol=tolerance)


@dtypes
@heads
def test_small_causal_segments_are_one_masked_call(
    dtype: torch.dtype, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(
        cpu,
        "attend_masked",
        lambda *arguments: calls.append(arguments) or attend_masked(*arguments),
    )
    for rows, keys in ((16, 4096), (16, 4097), (256, 256), (257, 257)):
        assert (rows * keys <= cpu._SMALL_MASK) == (keys in (4096, 256))
        q, k, v = draw(rows, keys, heads, dtype)
        agree(partial_attention(q, k, v, causal=True), q, k, v, causal=True)
    assert len(calls) == 2  # one for each of the two small segments


@dtypes
@rows
def test_attention_over_no_keys_is_empty(dtype: torch.dtype, rows: int) -> None:
    q, k, v = draw(rows, 0, (8, 2), dtype)
    out, lse = partial_attention(q, k, v, causal=False)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((rows, 8), -torch.inf))


@dtypes
@heads
@rows
def test_merge_of_any_split_is_attention_over_all_keys(
    dtype: torch.dtype, heads: tuple[int, int], rows: int
) -> None:
    q, k, v = draw(rows, 120 + rows, heads, dtype)
    generator = torch.Generator().manual_seed(rows)
    for count in (1, 2, 5):
        splits = sorted(torch.randint(121, (count,), generator=generator).tolist())
        # with at least one empty part; the last contains the queries' own keys
        bounds = [0, *splits, splits[-1], len(k)]
        parts = [
            partial_attention(q, k[start:end], v[start:end], causal=end == len(k))
            for start, end in pairwise(bounds)
        ]
        agree(merge(parts), q, k, v, causal=True)


def test_merge_does_not_depend_on_the_order_of_keys() -> None:
    q, k, v = draw(5, 90, (6, 3), torch.float32)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0)).split([1, 40, 9, 40])
    agree(
        merge([partial_attention(q, k[part], v[part], causal=False) for part in order]),
        q,
        k,
        v,
        causal=False,
    )


def test_merge_of_empty_parts_is_empty() -> None:
    q, k, v = draw(3, 0, (4, 2), torch.float32)
    out, lse = merge([partial_attention(q, k, v, causal=False)] * 3)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((3, 4), -torch.inf))


def test_merge_of_very_different_magnitudes() -> None:
    q, k, v = draw(2, 64, (2, 2), torch.float32)
    k[:32] *= 200  # scores in the hundreds in one part
    agree(
        merge(
            [
                partial_attention(q, k[:32], v[:32], False),
                partial_attention(q, k[32:], v[32:], False),
            ]
        ),
        q,
        k,
        v,
        False,
    )


def test_merge_propagates_nan() -> None:
    q, k, v = draw(2, 64, (2, 2), torch.float32)
    v[3] = torch.nan
    out, _ = merge(
        [partial_attention(q, k[:32], v[:32], False), partial_attention(q, k[32:], v[32:], False)]
    )
    assert out.isnan().any(2).all()


CUDA_KERNELS = [
    pytest.param(cuda_flash, torch.float16, id="flash-float16"),
    pytest.param(cuda_flash, torch.bfloat16, id="flash-bfloat16"),
    pytest.param(cuda_float32, torch.float32, id="efficient-float32"),
    *(
        pytest.param(
            flash_attn_kernel,
            dtype,
            id=f"flash_attn-{dtype}",
            marks=pytest.mark.skipif(
                attention.backend("cuda", torch.float16).attend is not flash_attn_kernel,
                reason="flash-attn is not installed",
            ),
        )
        for dtype in (torch.float16, torch.bfloat16)
    ),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [9, 64, 130])
def test_large_heads_attend_to_many_keys_in_parts(
    keys: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []

    def op(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Partial:
        shapes.append(tuple(k.shape))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)

    monkeypatch.setattr(cuda, "_efficient_op", op)
    monkeypatch.setattr(cuda, "_PART_KEYS", 16)
    q, k, v = draw(3, keys, (8, 2), torch.float32, dim=320)
    agree(cuda_flash(q, k, v, causal), q, k, v, causal=causal)
    prefix = keys - 3 * causal
    assert any(shape[0] == prefix // 16 for shape in shapes) == (prefix >= 32)


@pytest.mark.parametrize(
    ("dim", "name"), [(64, "_flash_op"), (100, "_efficient_op"), (512, "_efficient_op")]
)
def test_torch_flash_kernel_gets_supported_head_dimensions(
    dim: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for operator in ("_flash_op", "_efficient_op"):

        def op(q: Tensor, *_: object, operator: str = operator) -> tuple[Tensor, Tensor]:
            calls.append(operator)
            return q, q[..., 0].float()

        monkeypatch.setattr(cuda, operator, op)
    x = torch.zeros(4, 2, dim)
    cuda_flash(x, x, x, False)
    assert calls == [name]


@pytest.mark.cuda
@heads
@rows
@pytest.mark.parametrize(("kernel", "dtype"), CUDA_KERNELS)
@pytest.mark.parametrize("dim", slow_except([64, 128]))
@pytest.mark.parametrize("long", [cuda._LONG, 100])
def test_cuda_kernels(
    kernel: Kernel,
    dtype: torch.dtype,
    heads: tuple[int, int],
    rows: int,
    dim: int,
    long: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "_LONG", long)
    for prefix in (0, 1, 500):
        q, k, v = draw(rows, prefix + rows, heads, dtype, "cuda", dim)
        agree(kernel(q, k, v, False), q, k, v, causal=False)
        if rows > 1:
            agree(kernel(q, k, v, True), q, k, v, causal=True)
        agree(partial_attention(q, k, v, True), q, k, v, causal=True)


@pytest.mark.cuda
@heads
@rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_cuda_mask(dtype: torch.dtype, heads: tuple[int, int], rows: int) -> None:
    q, k, v = draw(rows, 300, heads, dtype, "cuda", 64)
    mask = draw_mask(rows, 300, "cuda")
    out, lse = masked_attention(q, k, v, mask)
    expected, expected_lse = reference_attention(q, k, v, False, mask)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, expected_lse, atol=2e-2, rtol=2e-2)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_merge_of_two_parts(dtype: torch.dtype) -> None:
    q, k, v = draw(7, 300, (8, 2), dtype, "cuda", 64)
    for split in (0, 1, 120, 300):
        parts = [
            partial_attention(q, keys, values, False)
            for keys, values in ((k[:split], v[:split]), (k[split:], v[split:]))
        ]
        agree(merge(parts), q, k, v, causal=False)
    out, lse = merge([partial_attention(q, k[:0], v[:0], False)] * 2)
    torch.testing.assert_close(out, torch.zeros_like(out))
    torch.testing.assert_close(lse, torch.full_like(lse, -torch.inf))
