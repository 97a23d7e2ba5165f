"""Fused kernels for caches with a slot per token, in triton's interpreter: as plain operations."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.attention.folding import Partial
from offload.cache import static_forward
from offload.cache.static_forward import Place, StaticForward
from offload.cache.static_shape import StaticCache
from offload.cache.streaming import StreamingCache
from offload.cache.streaming_shape import StreamingCacheSpec
from offload.kernels import selection
from offload.kernels.selection import slot_kernels
from offload.layout import HeadShape, SlidingWindow
from offload.retrieval.shape import RetrievalCacheSpec
from support.driving import (
    BLOCK,
    CAPACITY,
    GROUPS,
    LAYOUT,
    RECENT,
    cache_pair,
    forward,
    prefill,
    random_qkv,
)
from support.interpreter import import_interpreted
from support.links import CPU, make_test_link
from support.reference import random_rotary
from support.slow import slow_except

pytest.importorskip("triton")
# two layers have a window, and other heads
WINDOWED = replace(
    LAYOUT,
    groups=GROUPS,
    window=SlidingWindow(9, frozenset({1, 2})),
    windowed_heads=HeadShape(2, 16, 3),
)
SHAPE = RetrievalCacheSpec(48, 4, RECENT, BLOCK, CAPACITY, 7, CAPACITY)


@pytest.fixture
def kernels() -> Any:
    """The interpreted kernels; on a machine with a GPU, tests/gpu tests the compiled ones."""
    return import_interpreted("offload.kernels.slot_attention")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "dim", "groups"),
    [(torch.bfloat16, 16, 3), (torch.bfloat16, 80, 1), (torch.float16, 128, 4)],
    ids=str,
)
def test_the_kernels_equal_plain_operations(
    dtype: torch.dtype, dim: int, groups: int, kernels: ModuleType
) -> None:
    selection._test_slots(kernels, CPU, dtype, dim, groups)


def _misplaced(kernels: ModuleType, what: str) -> Any:
    """Return `write` with one thing wrong: the rotation, the padding, or the slots."""

    def write(q: Tensor, k: Tensor, v: Tensor, angles: Any, table: Any, *where: Any) -> Tensor:
        out: Tensor = write_right(q, k, v, angles, table, *where)
        if what == "rotation":
            return out * 1.1
        layer, places = where
        if what == "padding":  # counts one token too many
            places = places + torch.tensor([1, 0, 0])
        else:
            places = places - torch.tensor([0, 1, 0])
        write_right(q, k, v, angles, table, layer, places)
        return out

    write_right = kernels.write
    return write


@pytest.mark.parametrize("what", ["rotation", "padding", "slots"])
def test_the_self_test_finds_wrong_writes(
    what: str, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "write", _misplaced(kernels, what))
    with pytest.raises(RuntimeError, match=r"rotation|written"):
        selection._test_slots(kernels, CPU, torch.bfloat16, 16, 2)


@pytest.mark.slow
@pytest.mark.parametrize("change", [-1, 1])
def test_the_self_test_finds_windows_that_are_too_long_or_short(
    change: int, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = kernels.attend

    def wrong_attend(q: Tensor, table: Any, layer: int, places: Tensor, *window: int) -> Any:
        return attend(q, table, layer, places, *(tokens + change for tokens in window))

    monkeypatch.setattr(kernels, "attend", wrong_attend)
    with pytest.raises(RuntimeError, match="attention to windows"):
        selection._test_slots(kernels, CPU, torch.bfloat16, 16, 2)


@pytest.mark.parametrize(
    "wrong",
    slow_except(
        [
            lambda table, places: (table, places - torch.tensor([0, 0, 2])),  # first valid slot
            lambda table, places: (replace(table, rows=table.rows[:, :1].repeat(1, 2, 1)), places),
            lambda table, places: (replace(table, codes=256), places),  # splits that are left out
        ],
        *(0, 1),
    ),
    ids=["first valid slot", "another sequence's table", "splits"],
)
def test_the_self_test_finds_wrong_attention(
    wrong: Any, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = kernels.attend

    def wrong_attend(q: Tensor, table: Any, layer: int, places: Tensor, *window: int) -> Any:
        table, places = wrong(table, places)
        return attend(q, table, layer, places, *window)

    monkeypatch.setattr(kernels, "attend", wrong_attend)
    with pytest.raises(RuntimeError, match="attention"):
        selection._test_slots(kernels, CPU, torch.bfloat16, 16, 2)


def _buffers(cache: StaticCache) -> list[Tensor]:
    layers = range(LAYOUT.layers)
    return [each for layer in layers for each in cache.buffers(layer)[:2] if each is not None]


def _outputs(
    caches: list[StaticCache], places: list[Place], qkv: list[tuple[Tensor, ...]], rows: int
) -> list[Partial]:
    """Return each layer's attention of a static forward of all caches."""
    static = StaticForward(caches, rows)
    for index, place in enumerate(places):
        static.place(index, place)
    static.begin_forward(len(qkv[0][0]))
    return [static.attend(layer, *each, 0) for layer, each in enumerate(qkv)]


@pytest.mark.parametrize("kind", slow_except(["16 bits", "8 bits", "streaming", "windows"], -1))
def test_sequences_of_different_sizes_share_launches(
    kind: str, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writes the KV, and gets the attention, that plain operations give it."""
    caches: list[StaticCache] = []
    layout = WINDOWED if kind == "windows" else LAYOUT
    for index, start in enumerate((70, 5, 40)):
        if kind in ("streaming", "windows"):
            rotary = random_rotary(layout, 40)
            cache = StreamingCache(layout, StreamingCacheSpec(3, 16 + index, 8), rotary, CPU)
            forward(cache, random_qkv(19, layout))
            cache.advance(19)
            caches.append(cache)
            continue
        shape = replace(SHAPE, quantised=kind == "8 bits", budget=48 - 4 * index)
        target, middle = cache_pair(make_test_link("view"), 2, shape)
        prefill(target, random_qkv(start), 32)
        caches.append(middle)
    rows = 4
    places = [Place.after(caches[0], 3), Place(0), Place.after(caches[2], 4)]
    qkv = random_qkv(rows * len(caches), layout)
    before = [[x.clone() for x in _buffers(cache)] for cache in caches]
    expected = _outputs(caches, places, qkv, rows)
    written = [[x.clone() for x in _buffers(cache)] for cache in caches]
    for cache, saved in zip(caches, before, strict=True):
        for tensor, each in zip(_buffers(cache), saved, strict=True):
            tensor.copy_(each)
    monkeypatch.setattr(static_forward, "slot_kernels", lambda *_: (kernels, ""))
    monkeypatch.setattr(kernels, "_SPLIT_KEYS", 64)  # several programs per head
    actual = _outputs(caches, places, qkv, rows)
    for out, other in zip(actual, expected, strict=True):
        for index, place in enumerate(places):
            own = slice(rows * index, rows * index + place.tokens)
            parts = ([part[own] for part in partial] for partial in (out, other))
            torch.testing.assert_close(*parts, atol=1e-5, rtol=1e-4)
    for cache, saved in zip(caches, written, strict=True):
        for tensor, each in zip(_buffers(cache), saved, strict=True):
            # the last slot is for padding
            torch.testing.assert_close(tensor[..., :-1, :], each[..., :-1, :])


@pytest.mark.slow
def test_a_sequence_gets_the_same_bits_beside_others(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_SPLIT_KEYS", 64)
    buffers = []
    for _ in range(3):
        codes = torch.randint(-127, 128, (2, 2, 640, 16), dtype=torch.int8)
        scales = torch.rand(2, 2, 640, 1).bfloat16()
        buffers.append((torch.randn(2, 2, 90, 16).bfloat16(), None, codes, scales))
    places = torch.tensor([[2, 700, 8], [1, 640, 0], [2, 660, 600]])
    q = torch.randn(6, 4, 16).bfloat16()
    together = kernels.attend(q, kernels.SlotTable.of([buffers]), 0, places)
    for index, each in enumerate(buffers):
        rows, table = slice(2 * index, 2 * index + 2), kernels.SlotTable.of([[each]])
        alone = kernels.attend(q[rows], table, 0, places[index : index + 1])
        assert all(torch.equal(one, both[rows]) for one, both in zip(alone, together, strict=True))


def test_there_are_kernels_for_16_bits_on_a_gpu_alone() -> None:
    assert slot_kernels("cpu", torch.bfloat16, 64, 1) == (None, "there are none for cpu")
    _, reason = slot_kernels("cuda", torch.float32, 64, 1)
    assert reason == "there are none for torch.float32"
