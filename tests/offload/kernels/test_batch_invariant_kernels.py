"""The fused kernels for steady attention, in triton's interpreter, say what plain operations say,
and of a row the same in every company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.kernels import batch_invariant_attention as steady
from offload.kernels import selection as fused
from offload.kernels.batch_invariant_attention import batch_invariant_attention
from offload.kernels.batch_invariant_shape import KEY_BLOCK, ROW_BLOCK, working_bytes
from offload.kernels.selection import batch_invariant_kernels
from offload.layout import KVLayout
from offload.memory.link import Link
from offload.traffic import ByteCounters
from support.driving import LAYOUT, forward, prefill, random_qkv, tiered_cache
from support.interpreter import interpreted
from support.slow import slow_except

pytest.importorskip("triton")
HEADS, GROUPS, DIM = 2, 3, 24  # which fills no power of two
every_dtype = pytest.mark.parametrize(
    "dtype", slow_except([torch.float32, torch.bfloat16, torch.float16], 1), ids=str
)


@pytest.fixture
def kernels() -> Any:
    """The kernels: interpreted, or where there is a GPU tested there (tests/gpu)."""
    return interpreted("offload.kernels.batch_invariant")


def inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values (2, Hkv, N, D), and a query for each token (N, Hq, D)."""
    source = torch.Generator().manual_seed(tokens)
    kv = torch.randn(2, HEADS, tokens, DIM, generator=source).to(dtype)
    return kv, torch.randn(tokens, HEADS * GROUPS, DIM, generator=source).to(dtype)


def cut(kv: Tensor, *bounds: int) -> Sequence[Tensor]:
    """Its parts, each in memory of its own that has room for more."""
    parts = []
    for room, (a, b) in enumerate(pairwise(bounds)):
        buffer = kv.new_full((2, kv.shape[1], b - a + 5 + 3 * room, kv.shape[3]), torch.nan)
        buffer[:, :, : b - a] = kv[:, :, a:b]
        parts.append(buffer[:, :, : b - a])
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
def test_it_is_attention(
    end: int, rows: int, boundary: int, dtype: torch.dtype, kernels: ModuleType
) -> None:
    kv, q = inputs(end, dtype)
    found = kernels.attend(q[-rows:], cut(kv, 0, boundary, end))
    wanted = batch_invariant_attention(q[-rows:], [kv], ByteCounters())
    assert found.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@every_dtype
@pytest.mark.parametrize(
    ("end", "keys"),
    slow_except([(90, 128), (131, 64)], 1),  # in one block of keys, and in three
)
def test_a_row_is_the_same_in_every_company(
    end: int, keys: int, dtype: torch.dtype, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "KEY_BLOCK", keys)  # shorter blocks: an interpreter takes its time
    kv, q = inputs(end, dtype)
    first = end - 11
    alone = torch.cat(
        [kernels.attend(q[at, None], [kv[:, :, : at + 1]]) for at in range(first, end)]
    )
    for start, stop in ((first, end), (first, first + 5), (end - 7, end), (first + 3, first + 9)):
        cuts = [(start,), (17,), (), (start - 5,)]
        for cut_at in cuts if start == first else cuts[:2]:
            found = kernels.attend(q[start:stop], cut(kv, 0, *cut_at, stop))
            assert torch.equal(found, alone[start - first : stop - first])
    by_head = [
        kernels.attend(q[first:, head * GROUPS : (head + 1) * GROUPS], [kv[:, head, None]])
        for head in range(HEADS)
    ]
    assert torch.equal(torch.cat(by_head, dim=1), alone)
    # whatever stands in memory behind the last token
    assert torch.equal(kernels.attend(q[first:], cut(kv, 0, end)), alone)
    # keys that are no numbers are those of later tokens
    spoilt = kv.clone()
    spoilt[0, :, -1] = torch.nan
    assert torch.equal(kernels.attend(q[first:], [spoilt])[:-1], alone[:-1])


@pytest.mark.parametrize("groups", [1, 8, 11])  # of the last, rows go in several programs
def test_query_heads_may_be_few_or_many(groups: int, kernels: ModuleType) -> None:
    kv, _ = inputs(150, torch.float32)
    q = torch.randn(13, HEADS * groups, DIM)
    found = kernels.attend(q, cut(kv, 0, 141, 150))
    torch.testing.assert_close(
        found, batch_invariant_attention(q, [kv], ByteCounters()), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("link", slow_except(["view", "emulated"], 1), indirect=True)
def test_layers_attend_with_them_wherever_their_kv_lives(
    link: Link, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit as if all were in one buffer, in passes of any width."""
    monkeypatch.setattr(steady, "batch_invariant_kernels", lambda *_: (kernels, ""))
    layout = replace(LAYOUT, layers=3, heads=2, dtype=torch.bfloat16)
    places = [
        {"resident": 3},
        {"resident": 1},
        {"resident": 1, "split": 1, "compressed": True},
    ]
    caches = [tiered_cache(link, **place, layout=layout, batch_invariant=True) for place in places]
    prompt = random_qkv(50, layout)
    for cache in caches:
        cache.rotary = caches[0].rotary
        prefill(cache, prompt, chunk=16)
    story = random_qkv(20, layout)
    for start, stop in ((0, 1), (1, 8), (8, 20)):
        tokens = [(q[start:stop], k[start:stop], v[start:stop]) for q, k, v in story]
        whole, *others = [forward(cache, tokens) for cache in caches]
        assert all(torch.equal(each, whole) for each in others)
        for cache in caches:
            cache.advance(stop - start)


def test_bytes_are_those_that_blocks_of_rows_read(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steady, "batch_invariant_kernels", lambda *_: (kernels, ""))
    kv, q = inputs(100, torch.float32)
    traffic = ByteCounters()
    batch_invariant_attention(q[-13:], cut(kv, 0, 80, 100), traffic)
    # rows from 87 on, of the blocks that begin at 80, 88 and 96
    assert traffic.attended == kv.nbytes // 100 * (88 + 96 + 100)


def test_what_they_hold_is_planned(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, q = inputs(KEY_BLOCK + 3, torch.float32)
    taken: list[int] = []
    empty = torch.empty

    def counted(*shape: Any, **given: Any) -> Tensor:
        made = empty(*shape, **given)
        taken.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", counted)
    kernels.attend(q[-ROW_BLOCK:], [kv])
    layout = KVLayout(1, HEADS, DIM, torch.float32)
    *partials, out = taken
    assert out == q[-ROW_BLOCK:].nbytes
    planned = working_bytes(layout, KEY_BLOCK + 3, ROW_BLOCK, GROUPS) - 2 * layout.bytes(KEY_BLOCK)
    assert sum(partials) == planned


def test_memory_that_is_short_says_nothing_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fused, "_test_batch_invariant", short)
    batch_invariant_kernels.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        batch_invariant_kernels("cuda", torch.float32, 64, 1)


@pytest.mark.parametrize("keys", slow_except([128, KEY_BLOCK]))
def test_a_device_is_given_them_only_where_a_trial_shows_that_they_are_right(
    keys: int, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert batch_invariant_kernels("cpu", torch.float32, 64, 1) == (None, "there are none for cpu")
    monkeypatch.setattr(kernels, "KEY_BLOCK", keys)
    monkeypatch.setattr(
        fused, "_BATCH_INVARIANT_TOKENS", fused._BATCH_INVARIANT_TOKENS - KEY_BLOCK + keys
    )

    def trial(dtype: torch.dtype) -> None:
        fused._test_batch_invariant(kernels, torch.device("cpu"), dtype, 32, 2)

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        trial(dtype)
    attend = kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda *each: attend(*each) + 0.1)
    with pytest.raises(RuntimeError, match=r"steady attention in torch\.float16 is off by 0\.1"):
        trial(torch.float16)
    # a row that knows how many others there are
    monkeypatch.setattr(kernels, "attend", lambda q, kv: attend(q, kv) + 1e-6 * len(q))
    with pytest.raises(RuntimeError, match=r"in torch\.float32 depends on other rows"):
        trial(torch.float32)
