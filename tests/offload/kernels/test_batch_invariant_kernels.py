"""Fused batch-invariant kernels, in triton's interpreter: they match plain operations, and a row's
result does not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.kernels import batch_invariant_attention as attention_module
from offload.kernels import selection
from offload.kernels.batch_invariant_attention import batch_invariant_attention
from offload.kernels.batch_invariant_shape import KEY_BLOCK, ROW_BLOCK, working_bytes
from offload.kernels.selection import batch_invariant_kernels
from offload.layout import KVLayout
from offload.memory.link import Link
from offload.traffic import ByteCounters
from support.driving import LAYOUT, forward, prefill, random_qkv, tiered_cache
from support.interpreter import import_interpreted
from support.slow import slow_except

pytest.importorskip("triton")
HEADS, GROUPS, DIM = 2, 3, 24  # not a power of two
every_dtype = pytest.mark.parametrize(
    "dtype", slow_except([torch.float32, torch.bfloat16, torch.float16], 1), ids=str
)


@pytest.fixture
def kernels() -> Any:
    """The interpreted kernels; on a machine with a GPU, tests/gpu tests the compiled ones."""
    return import_interpreted("offload.kernels.batch_invariant")


def inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values (2, Hkv, N, D), and a query for each token (N, Hq, D)."""
    generator = torch.Generator().manual_seed(tokens)
    kv = torch.randn(2, HEADS, tokens, DIM, generator=generator).to(dtype)
    return kv, torch.randn(tokens, HEADS * GROUPS, DIM, generator=generator).to(dtype)


def split_kv(kv: Tensor, *bounds: int) -> Sequence[Tensor]:
    """Return parts of kv, each in its own larger buffer, padded with NaNs."""
    parts = []
    for index, (start, end) in enumerate(pairwise(bounds)):
        tokens = end - start
        buffer = kv.new_full((2, kv.shape[1], tokens + 5 + 3 * index, kv.shape[3]), torch.nan)
        buffer[:, :, :tokens] = kv[:, :, start:end]
        parts.append(buffer[:, :, :tokens])
    return parts


@every_dtype
@pytest.mark.parametrize(
    ("end", "rows", "boundary"),
    [
        (1, 1, 1),
        (3, 3, 0),
        (100, 19, 80),
        (100, 19, 90),
        (KEY_BLOCK + 3, 9, KEY_BLOCK - 5),
        (KEY_BLOCK, 2, KEY_BLOCK),
    ],
)
def test_kernels_match_plain_operations(
    end: int, rows: int, boundary: int, dtype: torch.dtype, kernels: ModuleType
) -> None:
    kv, q = inputs(end, dtype)
    actual = kernels.attend(q[-rows:], split_kv(kv, 0, boundary, end))
    expected = batch_invariant_attention(q[-rows:], [kv], ByteCounters())
    assert actual[0].dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.slow
@every_dtype
@pytest.mark.parametrize(
    ("end", "keys"),
    [(90, 128), (131, 64)],  # one block of keys, and three
)
def test_result_of_a_row_does_not_depend_on_other_rows(
    end: int, keys: int, dtype: torch.dtype, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "KEY_BLOCK", keys)  # short blocks: the interpreter is slow
    kv, q = inputs(end, dtype)
    first = end - 11
    alone = torch.cat(
        [kernels.attend(q[row, None], [kv[:, :, : row + 1]])[0] for row in range(first, end)]
    )
    for start, stop in ((first, end), (first, first + 5), (end - 7, end), (first + 3, first + 9)):
        boundaries = [(start,), (17,), (), (start - 5,)]
        for boundary in boundaries if start == first else boundaries[:2]:
            actual, _ = kernels.attend(q[start:stop], split_kv(kv, 0, *boundary, stop))
            assert torch.equal(actual, alone[start - first : stop - first])
    by_head = [
        kernels.attend(q[first:, head * GROUPS : (head + 1) * GROUPS], [kv[:, head, None]])[0]
        for head in range(HEADS)
    ]
    assert torch.equal(torch.cat(by_head, dim=1), alone)
    # with NaNs in memory after the last token
    assert torch.equal(kernels.attend(q[first:], split_kv(kv, 0, end))[0], alone)
    # earlier rows ignore a NaN key of the last token
    with_nan = kv.clone()
    with_nan[0, :, -1] = torch.nan
    assert torch.equal(kernels.attend(q[first:], [with_nan])[0][:-1], alone[:-1])


@pytest.mark.parametrize("groups", [1, 8, 11])  # 11: rows are split over programs
def test_any_number_of_query_heads_per_kv_head(groups: int, kernels: ModuleType) -> None:
    kv, _ = inputs(150, torch.float32)
    q = torch.randn(13, HEADS * groups, DIM)
    actual = kernels.attend(q, split_kv(kv, 0, 141, 150))
    expected = batch_invariant_attention(q, [kv], ByteCounters())
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("link", slow_except(["view", "emulated"], 1), indirect=True)
def test_layers_attend_with_kernels_wherever_their_kv_is(
    link: Link, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are bit-identical to attention over one buffer, with any number of query tokens."""
    monkeypatch.setattr(attention_module, "batch_invariant_kernels", lambda *_: (kernels, ""))
    layout = replace(LAYOUT, layers=3, heads=2, dtype=torch.bfloat16)
    placements = [
        {"resident": 3},
        {"resident": 1},
        {"resident": 1, "split": 1, "compressed": True},
    ]
    caches = [
        tiered_cache(link, **each, layout=layout, batch_invariant=True) for each in placements
    ]
    prompt = random_qkv(50, layout)
    for cache in caches:
        cache.rotary = caches[0].rotary
        prefill(cache, prompt, chunk=16)
    continuation = random_qkv(20, layout)
    for start, stop in ((0, 1), (1, 8), (8, 20)):
        tokens = [(q[start:stop], k[start:stop], v[start:stop]) for q, k, v in continuation]
        expected, *others = [forward(cache, tokens) for cache in caches]
        assert all(torch.equal(actual, expected) for actual in others)
        for cache in caches:
            cache.advance(stop - start)


def test_counted_bytes_are_those_read_by_blocks_of_rows(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_module, "batch_invariant_kernels", lambda *_: (kernels, ""))
    kv, q = inputs(100, torch.float32)
    traffic = ByteCounters()
    batch_invariant_attention(q[-13:], split_kv(kv, 0, 80, 100), traffic)
    # rows from 87 on are in the blocks that begin at 80, 88 and 96
    assert traffic.attended == kv.nbytes // 100 * (88 + 96 + 100)


def test_working_memory_is_planned(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, q = inputs(KEY_BLOCK + 3, torch.float32)
    sizes: list[int] = []
    empty = torch.empty

    def counting_empty(*shape: Any, **options: Any) -> Tensor:
        tensor = empty(*shape, **options)
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", counting_empty)
    kernels.attend(q[-ROW_BLOCK:], [kv])
    layout = KVLayout(1, HEADS, DIM, torch.float32)
    *partials, out, lse = sizes
    assert out == q[-ROW_BLOCK:].nbytes
    planned = working_bytes(layout, KEY_BLOCK + 3, ROW_BLOCK, GROUPS) - 2 * layout.bytes(KEY_BLOCK)
    assert sum(partials) + lse == planned


def test_out_of_memory_in_the_self_test_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(selection, "_test_batch_invariant", fails)
    batch_invariant_kernels.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        batch_invariant_kernels("cuda", torch.float32, 64, 1)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [128, KEY_BLOCK])
def test_self_test_detects_wrong_kernels(
    keys: int, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert batch_invariant_kernels("cpu", torch.float32, 64, 1) == (None, "there are none for cpu")
    monkeypatch.setattr(kernels, "KEY_BLOCK", keys)
    monkeypatch.setattr(
        selection, "_BATCH_INVARIANT_TOKENS", selection._BATCH_INVARIANT_TOKENS - KEY_BLOCK + keys
    )

    def self_test(dtype: torch.dtype) -> None:
        selection._test_batch_invariant(kernels, torch.device("cpu"), dtype, 32, 2)

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        self_test(dtype)
    attend = kernels.attend

    def add(monkeypatch: pytest.MonkeyPatch, error: Callable[[Tensor], float], part: int) -> None:
        def attend_wrongly(q: Tensor, kv: list[Tensor]) -> list[Tensor]:
            partial = list(attend(q, kv))
            partial[part] = partial[part] + error(q)
            return partial

        monkeypatch.setattr(kernels, "attend", attend_wrongly)

    add(monkeypatch, lambda q: 0.1, 0)
    with pytest.raises(
        RuntimeError, match=r"batch-invariant attention in torch\.float16 is off by 0\.1"
    ):
        self_test(torch.float16)
    # a result that depends on the number of rows
    add(monkeypatch, lambda q: 1e-6 * len(q), 0)
    with pytest.raises(RuntimeError, match=r"in torch\.float32 depends on other rows"):
        self_test(torch.float32)
    add(monkeypatch, lambda q: 0.2, 1)
    with pytest.raises(RuntimeError, match=r"log-sum-exp of .* is off by 0\.2"):
        self_test(torch.bfloat16)
