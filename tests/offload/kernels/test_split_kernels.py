"""Fused kernels for split floats, in triton's interpreter, match plain operations."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.attention import partial_attention
from offload.attention.folding import Partial
from offload.codec.format import SplitFormat, split_format
from offload.codec.outliers import Outliers
from offload.codec.selected_keys import SelectedKeys, pack
from offload.codec.split_float import Offsets, SplitFloatCodec
from offload.kernels import selection
from offload.kernels.selection import split_kernels
from offload.memory.link import Link
from offload.tiered import split as split_layer
from offload.tiered.cache import TieredCache
from offload.traffic import ByteCounters
from support.driving import LAYOUT, forward, prefill, random_qkv, tiered_cache
from support.interpreter import import_interpreted
from support.slow import slow_except

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]
every_dtype = pytest.mark.parametrize(
    "dtype", slow_except([torch.bfloat16, torch.float16]), ids=str
)


@pytest.fixture
def kernels() -> Any:
    """The interpreted kernels; on a machine with a GPU, tests/gpu tests the compiled ones."""
    return import_interpreted("offload.kernels.split_float")


def format_of(dtype: torch.dtype) -> SplitFormat:
    fmt = split_format(dtype)
    assert fmt is not None
    return fmt


def split_random_kv(
    dtype: torch.dtype, heads: int, tokens: int, dim: int
) -> tuple[SplitFloatCodec, Tensor, Tensor, Offsets, Tensor]:
    """Return a codec, high bytes and low bits of 9 tokens more, offsets, and these as a tensor."""
    codec = SplitFloatCodec(format_of(dtype))
    # heads of different scales have different offsets
    scale = torch.tensor([0.01, 1.0, 30.0])[:heads, None, None]
    kv = (torch.randn(2, heads, tokens + 9, dim) * scale).to(dtype)
    offsets = codec.offsets(kv)
    high, low, _ = codec.split(kv, offsets)
    return codec, high, low, offsets, torch.tensor(offsets, dtype=torch.int32)


@every_dtype
@pytest.mark.parametrize(("heads", "tokens", "dim"), [(1, 1, 64), (3, 37, 80), (2, 100, 16)])
def test_reconstruction_matches_plain_operations(
    dtype: torch.dtype, heads: int, tokens: int, dim: int, kernels: ModuleType
) -> None:
    codec, high, low, offsets, table = split_random_kv(dtype, heads, tokens, dim)
    actual, expected = (torch.zeros(2, heads, tokens + 20, dim, dtype=dtype) for _ in range(2))
    parts = high[:, :, :tokens], low[:, :, :tokens]
    codec.reconstruct(*parts, offsets, expected[:, :, :tokens])
    kernels.reconstruct(codec.format, *parts, table, actual[:, :, :tokens])
    assert torch.equal(actual.view(torch.int16), expected.view(torch.int16))


@every_dtype
@pytest.mark.parametrize(("heads", "tokens", "dim"), [(1, 1, 64), (3, 37, 80), (2, 100, 16)])
def test_splitting_and_outliers_match_plain_operations(
    dtype: torch.dtype, heads: int, tokens: int, dim: int, kernels: ModuleType
) -> None:
    codec = SplitFloatCodec(format_of(dtype))
    buffer = torch.randn(2, heads, tokens + 9, dim).to(dtype)
    offsets = codec.offsets(buffer)
    buffer[:, :, ::3, ::5] *= 2.0**-12  # smaller than high bytes reach
    buffer[:, 0, 0, 0] = torch.tensor([torch.inf, torch.nan])
    kv = buffer[:, :, :tokens]
    table = torch.tensor(offsets, dtype=torch.int32)
    expected = codec.split(kv, offsets)
    high, low, is_outlier = kernels.split(codec.format, kv, table)
    for actual, plain in zip((high, low, is_outlier), expected, strict=True):
        assert actual.dtype == plain.dtype
        assert torch.equal(actual, plain)
    assert is_outlier.any()
    outliers = Outliers(kv.numel(), heads, kv.device)
    for start in range(0, tokens, 20):
        block = slice(start, start + 20)
        outliers.append(kv[:, :, block], is_outlier[:, :, block], start)
    for first in range(heads):  # the heads from `first` on
        out = torch.zeros(2, heads, tokens + 4, dim, dtype=dtype)
        count = heads - first
        kernels.reconstruct(
            codec.format, high[:, first:], low[:, first:], table[:, first:], out[:, :count, :tokens]
        )
        outliers.apply(out, first, count, kernels)
        actual = out[:, :count, :tokens].view(torch.int16)
        assert torch.equal(actual, kv[:, first:].view(torch.int16))
        assert not out[:, count:].any()
    outliers.truncate(0, dim)
    untouched = out.clone()
    outliers.apply(out, 0, heads, kernels)  # there are none
    assert torch.equal(out.view(torch.int16), untouched.view(torch.int16))


@every_dtype
@pytest.mark.parametrize(
    ("rows", "groups", "tokens", "dim"),
    [(1, 1, 1, 64), (1, 4, 63, 64), (7, 3, 300, 80), (33, 2, 257, 16), (2, 2, 1200, 32)],
)
def test_attention_over_high_bytes_matches_plain_operations(
    dtype: torch.dtype, rows: int, groups: int, tokens: int, dim: int, kernels: ModuleType
) -> None:
    codec, high, _, offsets, table = split_random_kv(dtype, 2, tokens, dim)
    high = high[:, :, :tokens]
    decoded = torch.empty(high.shape, dtype=dtype)
    codec.reconstruct(high, None, offsets, decoded)
    q = torch.randn(rows, 2 * groups, dim).to(dtype)
    check_attention(lambda recent: kernels.attend(codec.format, q, high, table, recent), q, decoded)


def check_attention(attend: Callable[[Partial], Partial], q: Tensor, prefix: Tensor) -> None:
    """Check attention of q over the prefix (2, H, N, D) and recent keys, also without any."""
    heads, _, dim = prefix.shape[1:]
    recent_kv = torch.randn(2, heads, 30, dim).to(q.dtype)
    for count in (30, 0):  # keys that are not split
        keys, values = recent_kv[:, :, :count].transpose(1, 2)
        recent = partial_attention(q, keys, values, causal=False)
        out, lse = attend(recent)
        keys, values = torch.cat((prefix, recent_kv[:, :, :count]), dim=2).float().transpose(1, 2)
        expected, expected_lse = partial_attention(q.float(), keys, values, causal=False)
        assert out.dtype == q.dtype
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-3)


@every_dtype
@pytest.mark.parametrize(
    ("rows", "tokens", "dim", "chunk", "chunks"),
    [
        (1, 1003, 64, 8, [[*range(70)], [*range(1, 125, 2), *range(0, 16, 2)]]),
        (7, 300, 80, 5, [[3, 0, 59], [7, 9, 12]]),
        (17, 513, 16, 8, [[63], [2]]),
        (3, 600, 32, 12, [[*range(50)], [*range(49, -1, -1)]]),
        (1, 45, 64, 8, [[4, 1], []]),
        (1, 45, 48, 8, [[], []]),
    ],
    ids=["16 rows", "32 rows", "64 rows", "everything", "nothing of a head", "nothing"],
)
def test_attention_with_selected_keys_matches_plain_operations(
    dtype: torch.dtype,
    rows: int,
    tokens: int,
    dim: int,
    chunk: int,
    chunks: list[list[int]],
    kernels: ModuleType,
) -> None:
    codec, high, low, offsets, table = split_random_kv(dtype, 2, tokens, dim)
    high, low = high[:, :, :tokens], low[:, :, :tokens]
    prefix, exact = (torch.empty(high.shape, dtype=dtype) for _ in range(2))
    codec.reconstruct(high, None, offsets, prefix)
    codec.reconstruct(high, low, offsets, exact)
    selected = selected_keys(codec.format, exact[0], chunks, chunk)
    for head in range(2):
        if chunks[head]:
            selected.complete(prefix[0, head : head + 1, : tokens // chunk * chunk], head)
    # keys differ in scale; peaks, or low bits would not show
    q = (torch.randn(rows, 2, 4, dim) * torch.tensor([400.0, 4.0])[:, None, None]).to(dtype)
    q = q.flatten(1, 2)
    check_attention(
        lambda recent: kernels.attend(codec.format, q, high, table, recent, selected), q, prefix
    )


def selected_keys(
    fmt: SplitFormat, keys: Tensor, chunks: list[list[int]], chunk: int
) -> SelectedKeys:
    """Return these chunks of each head of keys (H, N, D), in views of larger buffers.

    There is room for equally many of each head, also if it has none.
    """
    heads, tokens, dim = keys.shape
    count = max(map(len, chunks))
    indices = torch.tensor([each or [0] * count for each in chunks], dtype=torch.int64)
    whole = tokens // chunk
    lows = torch.full((heads, count * chunk + 5, fmt.low_key_bytes(dim)), 255, dtype=torch.uint8)
    lows = lows[:, 2 : 2 + count * chunk]
    places = torch.zeros(heads, whole + 2, dtype=torch.int32)[:, :whole].fill_(-1)
    packed = pack(fmt, keys[:, : whole * chunk].unflatten(1, (-1, chunk)))
    for head, own in enumerate(chunks):
        if own:
            lows[head] = packed[head, own].flatten(0, 1)
            places[head, own] = torch.arange(count, dtype=torch.int32)
    return SelectedKeys(fmt, lows, indices, places, chunk)


@every_dtype
@pytest.mark.parametrize("link", slow_except(["view", "emulated"], 1), indirect=True)
@pytest.mark.parametrize(("layers", "compressed"), [(3, False), (1, True)])
def test_layers_attend_alike_with_and_without_kernels(
    link: Link,
    dtype: torch.dtype,
    layers: int,
    compressed: bool,
    kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = replace(LAYOUT, dtype=dtype)

    def cache(module: ModuleType | None) -> TieredCache:
        monkeypatch.setattr(split_layer, "split_kernels", lambda *_: (module, ""))
        return tiered_cache(link, resident=1, split=layers, layout=layout, compressed=compressed)

    fused, plain = cache(kernels), cache(None)
    plain.rotary = fused.rotary
    prompt, tokens = random_qkv(70, layout), random_qkv(5, layout)
    assert torch.equal(prefill(fused, prompt, chunk=16), prefill(plain, prompt, chunk=16))
    assert torch.equal(forward(fused, tokens), forward(plain, tokens))
    for layer, (q, k, v) in enumerate(tokens):
        if not fused.layers[layer].is_on_device:
            continue
        outs = []
        for tiers in (fused, plain):
            kv = tiers.layers[layer]
            kv.append(tiers.rotary.keys(k, 70, layer), v, 70, tiers.boundary)
            rotated = tiers.rotary.queries(q, 70, layer)
            out, lse = kv.attend_on_device(rotated, 75, tiers.boundary, ByteCounters())
            outs.append((out.float(), lse))
        torch.testing.assert_close(*outs, atol=2e-2, rtol=2e-2)


# a test for each GPU, or two: all at once took longer than a test's time limit on a slow machine
@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["80", "89 split", "89 others", "90"])
def test_kernels_compile_for_gpus(arguments: str, tmp_path: Path) -> None:
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": folders}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "support.compiled", *arguments.split()]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.stdout == "compiled\n", result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 3, 4, 7, 16])
def test_self_test_compiles_every_kernel_that_a_model_launches(
    groups: int, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel is compiled for each number of query heads per KV head and of rows per block."""
    launches = set()

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: Any, **constants: Any) -> None:
                has_selected = arguments[lows] is not None
                launches.add((constants["GROUPS"], constants["ROWS"], has_selected, grid[1]))
                kernel[grid](*arguments, **constants)

            return launch

    attention = import_interpreted("offload.kernels.split_attention")
    kernel = attention._attend
    lows = kernel.arg_names.index("lows")
    monkeypatch.setattr(attention, "_attend", Spy())
    selection._test_split(kernels, torch.device("cpu"), torch.bfloat16, 32, groups)
    variants = {launch[:3] for launch in launches}
    assert variants == {(groups, *each) for each in product((16, 32, 64), (False, True))}
    assert max(blocks for *_, blocks in launches) == 2


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_self_test_detects_wrong_kernels(
    dim: int, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert split_kernels("cpu", torch.bfloat16, 64, 1) == (None, "there are none for cpu")
    _, reason = split_kernels("cuda", torch.float32, 64, 1)
    assert reason == "elements of torch.float32 cannot be split"
    device = torch.device("cpu")
    selection._test_split(kernels, device, torch.bfloat16, dim, 2)
    selection._test_split(kernels, device, torch.float16, dim, 2)
    monkeypatch.setattr(kernels, "reconstruct", lambda *_: None)
    with pytest.raises(RuntimeError, match="are reconstructed incorrectly"):
        selection._test_split(kernels, device, torch.bfloat16, dim, 2)
    monkeypatch.undo()
    attend = kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda *arguments: (attend(*arguments)[0] + 0.1, None))
    with pytest.raises(RuntimeError, match=r"high bytes of torch\.float16 is off by 0\.1"):
        selection._test_split(kernels, device, torch.float16, dim, 2)


def _misread(kernels: ModuleType, change: Callable[[SelectedKeys], SelectedKeys | None]) -> Any:
    """Return `attend` that gets other selected keys than its caller's."""

    def attend(*arguments: Any) -> Partial:
        *others, selected = arguments
        attended: Partial = attend_right(*others, selected and change(selected))
        return attended

    attend_right = kernels.attend
    return attend


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "change",
    slow_except(
        [
            lambda selected: None,
            lambda selected: replace(selected, places=selected.places.flip(0)),
            lambda selected: replace(selected, places=selected.places.roll(1, 1)),
            lambda selected: replace(selected, lows=selected.lows.flip(0)),
            lambda selected: replace(selected, lows=selected.lows.roll(1, 1)),
            lambda selected: replace(selected, lows=selected.lows.roll(1, 2)),
            lambda selected: replace(selected, lows=selected.lows ^ 4),
        ],
        2,
    ),
    ids=["none", "another head", "another chunk", "lows", "token", "dimension", "bits"],
)
def test_self_test_detects_wrong_selected_keys(
    dtype: torch.dtype,
    change: Callable[[SelectedKeys], SelectedKeys | None],
    kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "attend", _misread(kernels, change))
    with pytest.raises(RuntimeError, match="selected low bits of"):
        selection._test_split(kernels, torch.device("cpu"), dtype, 64, 2)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        subprocess.CalledProcessError(1, ["gcc", "main.c", "-I/usr/include/python3.12"]),
        FileNotFoundError(2, "No such file or directory", "cc"),
    ],
)
def test_reason_names_the_missing_compiler(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(selection, "_test_split", fails)
    split_kernels.cache_clear()
    kernels, reason = split_kernels("cuda", torch.bfloat16, 64, 1)
    split_kernels.cache_clear()
    assert kernels is None
    assert reason.endswith("triton needs gcc and Python.h here: install gcc and python3-dev")
