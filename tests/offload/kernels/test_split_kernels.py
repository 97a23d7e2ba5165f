"""The fused kernels, in triton's interpreter, say what plain operations say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.attention import partial_attention
from offload.codec.format import SplitFormat, split_format
from offload.codec.split_float import Offsets, SplitFloatCodec
from offload.kernels import selection as fused
from offload.kernels.selection import split_kernels
from offload.memory.link import Link
from offload.tiered import split as sliced_layer
from offload.tiered.cache import TieredCache
from offload.traffic import ByteCounters
from support.driving import LAYOUT, forward, prefill, random_qkv, tiered_cache
from support.interpreter import interpreted
from support.slow import slow_except

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]
every_dtype = pytest.mark.parametrize(
    "dtype", slow_except([torch.bfloat16, torch.float16]), ids=str
)


@pytest.fixture
def kernels() -> Any:
    """The kernels: interpreted, or where there is a GPU tested there (tests/gpu)."""
    return interpreted("offload.kernels.split_float")


def format_of(dtype: torch.dtype) -> SplitFormat:
    found = split_format(dtype)
    assert found is not None
    return found


def cut(
    dtype: torch.dtype, heads: int, tokens: int, dim: int
) -> tuple[SplitFloatCodec, Tensor, Tensor, Offsets, Tensor]:
    """Codec, codes and low bits with room behind each head's tokens, offsets, and their table."""
    codec = SplitFloatCodec(format_of(dtype))
    # heads differ in scale, so that their offsets do
    scale = torch.tensor([0.01, 1.0, 30.0])[:heads, None, None]
    kv = (torch.randn(2, heads, tokens + 9, dim) * scale).to(dtype)
    offsets = codec.offsets(kv)
    codes, lows, _ = codec.split(kv, offsets)
    return codec, codes, lows, offsets, torch.tensor(offsets, dtype=torch.int32)


@every_dtype
@pytest.mark.parametrize(("heads", "tokens", "dim"), [(1, 1, 64), (3, 37, 80), (2, 100, 16)])
def test_joined_elements_are_those_of_plain_operations(
    dtype: torch.dtype, heads: int, tokens: int, dim: int, kernels: ModuleType
) -> None:
    codec, codes, lows, offsets, table = cut(dtype, heads, tokens, dim)
    found, wanted = (torch.zeros(2, heads, tokens + 20, dim, dtype=dtype) for _ in range(2))
    parts = codes[:, :, :tokens], lows[:, :, :tokens]
    codec.reconstruct(*parts, offsets, wanted[:, :, :tokens])
    kernels.reconstruct(codec.format, *parts, table, found[:, :, :tokens])
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


@every_dtype
@pytest.mark.parametrize(
    ("rows", "groups", "tokens", "dim"),
    [(1, 1, 1, 64), (1, 4, 63, 64), (7, 3, 300, 80), (33, 2, 257, 16), (2, 2, 1200, 32)],
)
def test_attention_to_codes_is_that_to_what_they_stand_for(
    dtype: torch.dtype, rows: int, groups: int, tokens: int, dim: int, kernels: ModuleType
) -> None:
    codec, codes, _, offsets, table = cut(dtype, 2, tokens, dim)
    codes = codes[:, :, :tokens]
    near = torch.empty(codes.shape, dtype=dtype)
    codec.reconstruct(codes, None, offsets, near)
    q = torch.randn(rows, 2 * groups, dim).to(dtype)
    out, lse = kernels.attend(codec.format, q, codes, table)
    keys, values = (each.transpose(0, 1).float() for each in near)
    wanted, wanted_lse = partial_attention(q.float(), keys, values, causal=False)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), wanted, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-3, rtol=1e-3)


@every_dtype
@pytest.mark.parametrize("link", slow_except(["view", "emulated"], 1), indirect=True)
@pytest.mark.parametrize(("layers", "compressed"), [(3, False), (1, True)])
def test_layers_say_the_same_with_them(
    link: Link,
    dtype: torch.dtype,
    layers: int,
    compressed: bool,
    kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = replace(LAYOUT, dtype=dtype)

    def cache(found: ModuleType | None) -> TieredCache:
        monkeypatch.setattr(sliced_layer, "split_kernels", lambda *_: (found, ""))
        return tiered_cache(link, resident=1, split=layers, layout=layout, compressed=compressed)

    fast, want = cache(kernels), cache(None)
    want.rotary = fast.rotary
    prompt, tokens = random_qkv(70, layout), random_qkv(5, layout)
    assert torch.equal(prefill(fast, prompt, chunk=16), prefill(want, prompt, chunk=16))
    assert torch.equal(forward(fast, tokens), forward(want, tokens))
    for layer, (q, k, v) in enumerate(tokens):
        if not fast.layers[layer].is_on_device:
            continue
        outs = []
        for each in (fast, want):
            each.layers[layer].append(each.rotary(k, 70, layer), v, 70, each.boundary)
            rotated = each.rotary(q, 70, layer)
            near = each.layers[layer].attend_on_device(rotated, 75, each.boundary, ByteCounters())
            outs.append(near.float())
        torch.testing.assert_close(*outs, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("shapes", slow_except(["first", "all"]))
def test_they_compile_for_gpus(shapes: str, tmp_path: Path) -> None:
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": folders}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "support.compiled", shapes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "compiled\n", done.stderr


@pytest.mark.parametrize("groups", slow_except([1, 3, 4, 7, 16], 1))
def test_a_trial_compiles_all_that_a_model_launches(
    groups: int, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel is compiled for each number of query heads per KV head, and of rows of a block."""
    launched = set()

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: Any, **constants: Any) -> None:
                launched.add((constants["GROUPS"], constants["ROWS"], grid[1]))
                real[grid](*arguments, **constants)

            return launch

    real = kernels._attend
    monkeypatch.setattr(kernels, "_attend", Spy())
    fused._test_split(kernels, torch.device("cpu"), torch.bfloat16, 32, groups)
    assert {(groups, rows) for rows in (16, 32, 64)} == {each[:2] for each in launched}
    assert max(blocks for *_, blocks in launched) == 2


@pytest.mark.parametrize("dim", slow_except([64, 80, 128], 1))
def test_a_device_is_given_them_only_where_a_trial_shows_that_they_are_right(
    dim: int, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert split_kernels("cpu", torch.bfloat16, 64, 1) == (None, "there are none for cpu")
    _, why = split_kernels("cuda", torch.float32, 64, 1)
    assert why == "elements of torch.float32 cannot be split"
    device = torch.device("cpu")
    fused._test_split(kernels, device, torch.bfloat16, dim, 2)
    fused._test_split(kernels, device, torch.float16, dim, 2)
    monkeypatch.setattr(kernels, "reconstruct", lambda *_: None)
    with pytest.raises(RuntimeError, match="are joined wrongly"):
        fused._test_split(kernels, device, torch.bfloat16, dim, 2)
    monkeypatch.undo()
    attend = kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda *each: (attend(*each)[0] + 0.1, None))
    with pytest.raises(RuntimeError, match=r"codes of torch\.float16 is off by 0\.1"):
        fused._test_split(kernels, device, torch.float16, dim, 2)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        subprocess.CalledProcessError(1, ["gcc", "main.c", "-I/usr/include/python3.12"]),
        FileNotFoundError(2, "No such file or directory", "cc"),
    ],
)
def test_a_machine_that_cannot_compile_is_told_what_it_lacks(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(fused, "_test_split", fails)
    split_kernels.cache_clear()
    kernels, why = split_kernels("cuda", torch.bfloat16, 64, 1)
    split_kernels.cache_clear()
    assert kernels is None
    assert why.endswith("triton needs gcc and Python.h here: install gcc and python3-dev")
