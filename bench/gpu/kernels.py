"""Parts of a GPU day that need no model: the machine, pinning, copies and attention kernels."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from bench.gpu.choices import Context
from decoding.probe.rates import median_seconds, random_tensor
from decoding.probe.survey import Machine
from offload.attention import partial_attention
from offload.attention.folding import Partial, empty_partial
from offload.codec.format import SplitFormat, split_format
from offload.codec.selected_keys import SelectedKeys
from offload.kernels.batch_invariant_attention import batch_invariant_attention
from offload.kernels.selection import (
    batch_invariant_kernels,
    retrieval_kernels,
    slot_kernels,
    split_kernels,
)
from offload.memory.bandwidth import BandwidthProbe
from offload.memory.link_spec import make_link
from offload.traffic import ByteCounters
from parallel.formats.plane_format import PLANE_FORMATS, group_format
from parallel.weights.planes import Planes
from parallel.weights.selection import plane_kernels

_DIM = 128  # head dimension
_DTYPE = torch.bfloat16
_RECENT = 300  # tokens of a window
_CHUNK = 8  # tokens that are selected together
_WEIGHT_FORMATS = [
    *(PLANE_FORMATS[name] for name in ("Q4_K", "Q6_K", "Q8_0", "Q4_1", "IQ4_XS", "MXFP4")),
    group_format("int4", 128, "float16", has_zero=True),  # AWQ and GPTQ
    group_format("e4m3", 128, "bfloat16", has_zero=False),  # FP8 in blocks
]


def machine(context: Context) -> None:
    """The environment of the measurements: GPU, driver, host memory and versions."""
    detected = Machine.detect()
    context.add("device", str(context.device))
    if context.device.type == "cuda":
        context.add("name", torch.cuda.get_device_name(context.device))
    context.add("driver", detected.driver)
    context.add("available host memory", detected.host_available / 1e9, "GB")
    locked = "no limit" if detected.memlock is None else detected.memlock / 1e9
    context.add("memory that may be pinned (ulimit -l)", locked, "GB")
    context.add("CPU cores of this process", detected.usable_cores)
    context.add("C compiler", "yes" if shutil.which("gcc") or shutil.which("clang") else "no")
    for name in ("triton", "numpy", "flash-attn"):
        try:
            context.add(name, version(name))
        except PackageNotFoundError:
            context.add(name, "not installed")
    context.add("short forwards can be captured as CUDA graphs", "yes" if context.graphs else "no")


def pin(context: Context) -> None:
    """Pinning and freeing host memory: seconds per GB."""
    nbytes = (64 << 20) if context.is_small else (16 << 30)
    with closing(make_link(context.choices.link, context.device)) as link:
        started = time.perf_counter()
        buffer = link.host_empty(nbytes, torch.uint8)
        seconds = time.perf_counter() - started
        context.add("allocating and pinning", 1e9 * seconds / nbytes, "s/GB")
        started = time.perf_counter()
        link.release(buffer)
        context.add("freeing", 1e9 * (time.perf_counter() - started) / nbytes, "s/GB")


def link(context: Context) -> None:
    """Copies in both directions, by size: the smallest size that reaches the link's rate."""
    seconds = 0.05 if context.is_small else 0.3
    with closing(make_link(context.choices.link, context.device)) as measured:
        for size in (64 << 10, 512 << 10, 4 << 20, 33 << 20, 128 << 20):
            with closing(BandwidthProbe(measured, size)) as probe:
                for out, direction in ((False, "host to device"), (True, "device to host")):
                    rate = probe.rate(out, seconds) / 1e9
                    context.add(f"{size >> 10:,} KiB, pinned {direction}", rate, "GB/s")


def flash(context: Context) -> None:
    """Few rows over a long KV: whether the kernel splits the keys to use a GPU with few heads."""
    keys = 2048 if context.is_small else 131_072
    shapes = ((1, 1, 1), (1, 1, 33), (1, 4, 33), (8, 4, 1), (32, 1, 1), (32, 1, 33))
    for heads, groups, rows in shapes:
        run, nbytes = _attention(context, heads, groups, rows, keys)
        rate = nbytes / median_seconds(run) / 1e9
        context.add(f"{heads} KV heads x {groups}, {rows} rows", rate, "GB/s")


def chunks(context: Context) -> None:
    """Attention of a prefill chunk to the preceding tokens: the fastest number of rows."""
    keys = 512 if context.is_small else 65_536
    models = (("7B", 32, 1), ("7B on 2", 16, 1), ("8B", 8, 4), ("8B on 2", 4, 4))
    for name, heads, groups in models:
        for rows in (64,) if context.is_small else (1024, 1280, 1536, 2048, 2304, 3072, 4096):
            run, _ = _attention(context, heads, groups, rows, keys)
            flops = 4 * rows * heads * groups * _DIM * keys
            context.add(f"{name}, {rows:,} rows", flops / median_seconds(run, 3) / 1e12, "TFLOP/s")


def _attention(
    context: Context, heads: int, groups: int, rows: int, keys: int
) -> tuple[Callable[[], torch.Tensor], int]:
    """Return attention over random keys and values, and their bytes."""
    device = context.device
    kv = random_tensor(2, heads, keys, _DIM, device=device, dtype=_DTYPE).transpose(1, 2)
    q = random_tensor(rows, heads * groups, _DIM, device=device, dtype=_DTYPE)
    return lambda: partial_attention(q, kv[0], kv[1], causal=False)[0], kv.nbytes


def fused(context: Context) -> None:
    """Triton kernels (`offload.kernels`), for split floats, deterministic runs, and retrieval."""
    heads, groups = 8, 4
    tokens = 512 if context.is_small else 65_536
    _split_float(context, heads, groups, tokens)
    _batch_invariant(context, heads, groups, tokens)
    _retrieval(context, groups, tokens)
    _slots(context, tokens // 16)


def _split_float(context: Context, heads: int, groups: int, tokens: int) -> None:
    device = context.device
    kernels, why = split_kernels(device.type, _DTYPE, _DIM, groups)
    context.add("split kernels", why)
    split = split_format(_DTYPE)
    if kernels is None or split is None:
        return
    high_bytes = torch.randint(8, 120, (2, heads, tokens, _DIM), dtype=torch.uint8, device=device)
    low_bytes = torch.randint(0, 255, (1, heads, tokens, _DIM), dtype=torch.uint8, device=device)
    offsets = torch.full((2, heads), 14_000, dtype=torch.int32, device=device)
    out = torch.empty(2, heads, tokens, _DIM, dtype=_DTYPE, device=device)

    def reconstruct() -> torch.Tensor:
        kernels.reconstruct(split, high_bytes, low_bytes, offsets, out)
        return out

    def attend(q: torch.Tensor, selected: SelectedKeys | None) -> torch.Tensor:
        return kernels.attend(split, q, high_bytes, offsets, empty_partial(q), selected)[0]

    moved = high_bytes.nbytes + low_bytes.nbytes + out.nbytes
    context.add("reconstruction, bytes moved", moved / median_seconds(reconstruct) / 1e9, "GB/s")
    selected = _every_second_chunk(split, device, heads, tokens)
    read = high_bytes.nbytes + selected.nbytes
    for rows in (1, 3, 9, 17):
        q = random_tensor(rows, heads * groups, _DIM, device=device, dtype=_DTYPE)
        rate = high_bytes.nbytes / median_seconds(partial(attend, q, None)) / 1e9
        context.add(f"attention to high bytes, {rows} rows x {groups}", rate, "GB/s")
        rate = read / median_seconds(partial(attend, q, selected)) / 1e9
        what = f"attention to high bytes and half of the keys' low bits, {rows} rows x {groups}"
        context.add(what, rate, "GB/s")


def _every_second_chunk(
    split: SplitFormat, device: torch.device, heads: int, tokens: int
) -> SelectedKeys:
    """Return low bits of half of the keys."""
    chunks = torch.arange(0, tokens // _CHUNK, 2, device=device).expand(heads, -1)
    count = chunks.shape[1]
    shape = (heads, count * _CHUNK, split.low_key_bytes(_DIM))
    lows = torch.zeros(shape, dtype=torch.uint8, device=device)
    places = torch.full((heads, tokens // _CHUNK), -1, dtype=torch.int32, device=device)
    places[:, ::2] = torch.arange(count, device=device)
    return SelectedKeys(split, lows, chunks, places, _CHUNK)


def _output(attend: Callable[[], Partial]) -> torch.Tensor:
    return attend()[0]


def _batch_invariant(context: Context, heads: int, groups: int, tokens: int) -> None:
    device = context.device
    kernels, why = batch_invariant_kernels(device.type, _DTYPE, _DIM, groups)
    context.add("batch-invariant kernels", why)
    if kernels is None:
        tokens = min(tokens, 8_192)  # attention without kernels takes many launches
    kv = random_tensor(2, heads, tokens, _DIM, device=device, dtype=_DTYPE)
    for rows in (1, 9, 33):
        q = random_tensor(rows, heads * groups, _DIM, device=device, dtype=_DTYPE)
        attend = partial(batch_invariant_attention, q, [kv], ByteCounters())
        seconds = median_seconds(partial(_output, attend))
        rate = kv.nbytes / seconds / 1e9
        context.add(f"batch-invariant attention, {rows} rows x {groups}", rate, "GB/s")


def _retrieval(context: Context, groups: int, tokens: int) -> None:
    """Selection from a single head's keys, as heads are streamed, and storing chunks in 8 bits."""
    device = context.device
    kernels, why = retrieval_kernels(device.type, _DTYPE, _DIM, groups)
    context.add("retrieval kernels", why)
    if kernels is None:
        return
    kv = random_tensor(2, 1, tokens, _DIM, device=device, dtype=_DTYPE)
    recent = random_tensor(1, _RECENT, _DIM, device=device, dtype=_DTYPE)
    q = random_tensor(33, groups, _DIM, device=device, dtype=_DTYPE)
    chunks = torch.arange(512, device=device)[None]
    codes = torch.zeros(2, 1, 512 * _CHUNK, _DIM, dtype=torch.int8, device=device)
    scales = torch.zeros(2, 1, 512 * _CHUNK, 1, dtype=_DTYPE, device=device)

    def store() -> torch.Tensor:
        kernels.store_int8(kv, chunks, _CHUNK, codes, scales)
        return codes

    score = partial(kernels.chunk_scores, q, kv[0], recent, 8, _CHUNK)
    context.add("scores of one head's chunks", 1e6 * median_seconds(score), "us")
    context.add("storing 512 chunks in 8 bits", 1e6 * median_seconds(store), "us")


def weights(context: Context) -> None:
    """Packed matrices larger than an L2 cache: unpacking them, and products of a few rows."""
    rows, columns = (256, 1024) if context.is_small else (57_344, 4_096)
    for fmt in _WEIGHT_FORMATS:
        assert fmt is not None
        name = fmt.name
        kernels, why = plane_kernels(context.device.type, _DTYPE, fmt)
        context.add(f"{name} kernels", why)
        if kernels is None:
            continue
        planes = Planes(fmt, rows, columns, 0, context.device)
        planes.clear(slice(None))
        out = torch.empty(rows, columns, dtype=_DTYPE, device=context.device)
        seconds = median_seconds(partial(kernels.unpack, planes, 0, out))
        context.add(f"{name}, unpacking", (planes.nbytes + out.nbytes) / seconds / 1e9, "GB/s")
        for tokens in (1, 17, 64):
            x = random_tensor(tokens, columns, device=context.device, dtype=_DTYPE)
            seconds = median_seconds(partial(kernels.multiply, x, planes, 0, _DTYPE))
            rate = rows * columns / seconds / 1e9
            context.add(f"{name}, product of {tokens} rows", rate, "billion weights/s")


def _slots(context: Context, tokens: int) -> None:
    """Attention to selected tokens in 8 bits and a window, alone and of four sequences at once."""
    for heads, groups in ((32, 1), (8, 4)):
        kernels, why = slot_kernels(context.device.type, _DTYPE, _DIM, groups)
        context.add(f"slot kernels, {groups} query heads per KV head", why)
        if kernels is None:
            return
        for sequences in (1, 4):
            attend, nbytes = _slot_attention(context, kernels, heads, groups, tokens, sequences)
            what = f"attention to slots, {heads} KV heads x {groups}, {sequences} at once"
            context.add(what, nbytes / median_seconds(attend) / 1e9, "GB/s")


def _slot_attention(
    context: Context, kernels: Any, heads: int, groups: int, tokens: int, sequences: int
) -> tuple[Callable[[], torch.Tensor], int]:
    """Return attention in layers enough to exceed the L2 cache, and the bytes it reads."""
    device = context.device
    layers = [
        [
            (
                random_tensor(2, heads, _RECENT + 1, _DIM, device=device, dtype=_DTYPE),
                None,
                torch.zeros(2, heads, tokens, _DIM, dtype=torch.int8, device=device),
                torch.ones(2, heads, tokens, 1, dtype=_DTYPE, device=device),
            )
            for _ in range(sequences)
        ]
        for _ in range(16)
    ]
    places = torch.tensor([[1, tokens + _RECENT - 1, 0]] * sequences, device=device)
    q = random_tensor(sequences, heads * groups, _DIM, device=device, dtype=_DTYPE)
    table = kernels.SlotTable.of(layers)

    def attend() -> torch.Tensor:
        for layer in range(len(layers)):
            out: torch.Tensor = kernels.attend(q, table, layer, places)[0]
        return out

    kv, _, codes, scales = layers[0][0]
    assert codes is not None
    assert scales is not None
    return attend, len(layers) * sequences * (kv.nbytes + codes.nbytes + scales.nbytes)
