"""Selection of fused kernels: they are used on a device if they pass a self-test there."""

from __future__ import annotations

from functools import cache
from itertools import product
from types import ModuleType

import torch
from torch import Tensor

from offload.attention import partial_attention
from offload.attention.folding import Partial
from offload.attention.window import windowed_attention
from offload.codec.format import SplitFormat, split_format
from offload.codec.int8 import LARGEST, dequantise, quantise
from offload.codec.outliers import Outliers
from offload.codec.selected_keys import SelectedKeys, gather_chunks, pack
from offload.codec.split_float import SplitFloatCodec
from offload.kernels.batch_invariant_shape import KEY_BLOCK
from offload.rotary import rotate
from offload.self_test import Kernels, run_self_test

_HEADS, _TOKENS = 2, 300  # size of the self-test
_RECENT = 20  # keys of it that are not split
_WINDOW = 25  # slots of it: with some in 8 bits, if there are any
_CODES = 1100  # slots in 8 bits: several programs for each head
_CHUNK = 8  # tokens per chunk, the default of the retrieval cache
_SELECTED = 20  # chunks of a head of the self-test with exact keys
_BLOCKS = 16, 32, 64  # rows of a KV head per program: a kernel is compiled for each
_BATCH_INVARIANT_TOKENS, _BATCH_INVARIANT_ROWS = (
    KEY_BLOCK + 44,
    11,
)  # several blocks of keys and rows
_TOLERANCE = 2e-2  # attention in bfloat16 rounds its weights, too
_TOLERANCE_IN_32_BITS = 1e-4


@cache
def split_kernels(device: str, dtype: torch.dtype, dim: int, groups: int) -> Kernels:
    """Return `offload.kernels.split_float` if it can be used, or None, and the reason.

    Args:
        device: type of the device.
        dtype: of the elements to be split.
        dim: head dimension.
        groups: query heads per KV head.
    """
    if split_format(dtype) is None:
        return None, f"elements of {dtype} cannot be split"
    return run_self_test("offload.kernels.split_float", _test_split, device, dtype, dim, groups)


@cache
def batch_invariant_kernels(device: str, dtype: torch.dtype, dim: int, groups: int) -> Kernels:
    """Return `offload.kernels.batch_invariant` if it can be used, or None, and the reason.

    Args:
        device: type of the device.
        dtype: of the elements.
        dim: head dimension.
        groups: query heads per KV head.
    """
    return run_self_test(
        "offload.kernels.batch_invariant", _test_batch_invariant, device, dtype, dim, groups
    )


@cache
def retrieval_kernels(device: str, dtype: torch.dtype, dim: int, groups: int) -> Kernels:
    """Return `offload.kernels.retrieval` if it can be used, or None, and the reason.

    Args:
        device: type of the device.
        dtype: of the elements.
        dim: head dimension.
        groups: query heads per KV head.
    """
    if dtype.itemsize != 2:
        return None, f"there are none for {dtype}"
    kernels, reason = run_self_test(
        "offload.kernels.retrieval", _test_retrieval, device, dtype, dim, groups
    )
    if kernels is not None and not kernels.supports(1, groups, 1):
        reason += f"; selection has none for {groups} query heads per KV head"
    return kernels, reason


@cache
def slot_kernels(device: str, dtype: torch.dtype, dim: int, groups: int) -> Kernels:
    """Return `offload.kernels.slot_attention` if it can be used, or None, and the reason.

    Args:
        device: type of the device.
        dtype: of the elements.
        dim: head dimension.
        groups: query heads per KV head.
    """
    if dtype.itemsize != 2:
        return None, f"there are none for {dtype}"
    return run_self_test("offload.kernels.slot_attention", _test_slots, device, dtype, dim, groups)


def _test_split(
    kernels: ModuleType, device: torch.device, dtype: torch.dtype, dim: int, groups: int
) -> None:
    """Raise RuntimeError if the kernels' results differ from those of plain operations."""
    fmt = split_format(dtype)
    assert fmt is not None
    codec = SplitFloatCodec(fmt)
    counts = _row_counts(groups)
    kv, queries = _inputs(device, dtype, _TOKENS, dim, counts[-1], groups)
    # few keys have all the weight, or their low bits would not show; outputs are of up to 1 then
    queries *= 4
    kv[1] /= 4
    offsets = codec.offsets(kv)
    table = torch.tensor(offsets, dtype=torch.int32, device=device)
    high, low, outliers = codec.split(kv, offsets)
    names = ("high bytes", "low bits", "outliers")
    results = zip(names, kernels.split(fmt, kv, table), (high, low, outliers), strict=True)
    for name, actual, expected in results:
        if not torch.equal(actual, expected):
            raise RuntimeError(f"{name} of {dtype} are split incorrectly")
    actual, expected, decoded = torch.empty_like(kv), torch.empty_like(kv), torch.empty_like(kv)
    codec.reconstruct(high, low, offsets, expected)
    kernels.reconstruct(fmt, high, low, table, actual)
    if not torch.equal(actual.view(torch.int16), expected.view(torch.int16)):
        raise RuntimeError(f"elements of {dtype} are reconstructed incorrectly")
    stored = Outliers(kv.numel(), _HEADS, device)
    stored.append(kv, outliers, 0)
    stored.apply(actual, 0, _HEADS, kernels)
    if not torch.equal(actual, kv):
        raise RuntimeError(f"outliers of {dtype} are written incorrectly")
    codec.reconstruct(high, None, offsets, decoded)
    chosen = _selected_keys(fmt, kv[0])
    for rows, selected in product(counts, (None, chosen)):
        q = queries[:rows]
        prefix = decoded.clone()
        if selected is not None:
            selected.complete(prefix[0, :, : selected.places.shape[1] * _CHUNK], 0)
        keys, values = torch.cat((prefix, kv[:, :, :_RECENT]), dim=2).transpose(1, 2)
        whole = partial_attention(q, keys, values, causal=False)
        recent = partial_attention(q, keys[_TOKENS:], values[_TOKENS:], causal=False)
        attended = kernels.attend(fmt, q, high, table, recent, selected)
        what = "high bytes" if selected is None else "high bytes and selected low bits"
        _check_partial(f"attention over {what} of {dtype}", attended, whole)


def _selected_keys(fmt: SplitFormat, keys: Tensor) -> SelectedKeys:
    """Return chunks of keys (H, N, D), different ones of each head; the last keys are in none."""
    chunks = keys.shape[1] // _CHUNK
    heads = torch.arange(_HEADS, device=keys.device)[:, None]
    chosen = heads * (chunks - _SELECTED) + torch.arange(_SELECTED, device=keys.device)
    packed = pack(fmt, gather_chunks(keys[:, : chunks * _CHUNK], chosen, _CHUNK))
    # views of larger buffers, as those of a cache
    lows = torch.cat((packed[:, :3], packed), dim=1)[:, 3:]
    places = torch.full((_HEADS, chunks + 3), -1, dtype=torch.int32, device=keys.device)[:, :chunks]
    order = torch.arange(_SELECTED, dtype=torch.int32, device=keys.device)
    places.scatter_(1, chosen, order.expand(_HEADS, -1))
    return SelectedKeys(fmt, lows, chosen, places, _CHUNK)


def _row_counts(groups: int) -> list[int]:
    """Return numbers of rows with which all kernels for attention over high bytes are compiled.

    The largest has two blocks of the largest size; the second is incomplete.
    """
    rows = {max(1, block // groups) for block in _BLOCKS}
    return sorted(rows | {1, _BLOCKS[-1] // groups + 1})


def _test_batch_invariant(
    kernels: ModuleType, device: torch.device, dtype: torch.dtype, dim: int, groups: int
) -> None:
    """Raise RuntimeError if kernels are wrong, or a row's result depends on other rows."""
    kv, q = _inputs(device, dtype, _BATCH_INVARIANT_TOKENS, dim, _BATCH_INVARIANT_ROWS, groups)
    keys, values = kv.transpose(1, 2)
    expected = partial_attention(q, keys, values, causal=True)
    whole = kernels.attend(q, [kv])
    _check_partial(f"batch-invariant attention in {dtype}", whole, expected)
    first = (
        _BATCH_INVARIANT_TOKENS - _BATCH_INVARIANT_ROWS + 1
    )  # number of tokens the first row sees
    prefix = kv[:, :, :17].contiguous()
    alone = kernels.attend(q[:1], [prefix, kv[:, :, 17:first]])
    if not all(torch.equal(row[0], rows[0]) for row, rows in zip(alone, whole, strict=True)):
        raise RuntimeError(f"batch-invariant attention in {dtype} depends on other rows")


def _test_retrieval(
    kernels: ModuleType, device: torch.device, dtype: torch.dtype, dim: int, groups: int
) -> None:
    """Raise RuntimeError if the kernels' results differ from those of plain operations."""
    rows, count = 19, 8
    kv, q = _inputs(device, dtype, _TOKENS + rows + 2, dim, rows, groups)
    prefix, recent = kv[:, :, : _TOKENS // _CHUNK * _CHUNK], kv[0, :, -rows - 2 :]
    if kernels.supports(count, groups, _CHUNK):
        actual = kernels.chunk_scores(q, prefix[0], recent, count, _CHUNK)
        queries = [rows * (index + 1) // count for index in range(count)]  # up to each sampled one
        by_head = q.unflatten(1, (_HEADS, groups)).float() * dim**-0.5  # (T, H, G, D)
        weights = torch.stack(
            [
                torch.einsum(
                    "hgd,hnd->hgn",
                    by_head[end - 1],
                    torch.cat((prefix[0], recent[:, : 2 + end]), dim=1).float(),
                ).softmax(-1)[..., : prefix.shape[2]]
                for end in queries
            ]
        )  # (R, H, G, N)
        expected = weights.amax(0).mean(1).unflatten(1, (-1, _CHUNK)).sum(-1)
        _check_close(f"selection in {dtype}", actual / expected.amax(), expected / expected.amax())
        args = q, prefix[0], recent, count, _CHUNK
        previous = actual[:, :-1]
        added = kernels.chunk_scores(*args, previous, 0.5)
        actual[:, :-1] *= 1.5
        _check_close(
            f"earlier scores in {dtype}", added / expected.amax(), actual / expected.amax()
        )
    chunks = torch.tensor([[3, 0, 7], [5, 2, 0]], device=device)
    _test_stored_lows(kernels, prefix[0], chunks)
    size = chunks.shape[1] * _CHUNK
    codes = torch.zeros(2, _HEADS, size + 8, dim, dtype=torch.int8, device=device)
    scales = torch.zeros(2, _HEADS, size + 8, 1, dtype=dtype, device=device)
    kernels.store_int8(prefix, chunks, _CHUNK, codes[:, :, 8:], scales[:, :, 8:])
    actual = codes[:, :, 8:].float() * scales[:, :, 8:].float()
    expected = gather_chunks(prefix, chunks, _CHUNK).float()
    # half a step, and the rounding of the scale
    step = expected.abs().amax(-1, keepdim=True) / LARGEST
    if not ((actual - expected).abs() <= 0.51 * step + 1e-2 * expected.abs()).all():
        raise RuntimeError(f"elements of {dtype} are quantised incorrectly")


def _test_stored_lows(kernels: ModuleType, keys: Tensor, chunks: Tensor) -> None:
    """Raise RuntimeError if low bits of chunks (H, n) of keys (H, N, D) are stored incorrectly."""
    fmt = split_format(keys.dtype)
    assert fmt is not None
    size = chunks.shape[1] * _CHUNK
    width = fmt.low_key_bytes(keys.shape[2])
    stored = torch.zeros(_HEADS, size + 8, width, dtype=torch.uint8, device=keys.device)
    kernels.store_lows(fmt, keys, chunks, _CHUNK, stored[:, 8:])
    expected = pack(fmt, gather_chunks(keys, chunks, _CHUNK))
    if stored[:, :8].any() or not torch.equal(stored[:, 8:], expected):
        raise RuntimeError(f"low bits of {keys.dtype} are stored incorrectly")


def _test_slots(
    kernels: ModuleType, device: torch.device, dtype: torch.dtype, dim: int, groups: int
) -> None:
    """Raise RuntimeError if the kernels' results differ from those of plain operations."""
    for codes_slots, rows in product((0, _CODES), _row_counts(groups)):
        kv, q = _inputs(device, dtype, codes_slots + _RECENT + rows + 1, dim, 2 * rows, groups)
        before = kv[:, :, codes_slots:]
        # two sequences of different sizes, the second of which lacks a token
        sizes = [(codes_slots, rows), (codes_slots // 2, rows - 1)]
        selected, buffers = zip(*(_slot_buffers(kv, codes_slots, m) for m, _ in sizes), strict=True)
        table = kernels.SlotTable.of([buffers])
        firsts = [max(5, codes_slots - 90), codes_slots // 2 + 3]  # first valid slots
        places = torch.tensor(
            [[count, m + _RECENT, first] for (m, count), first in zip(sizes, firsts, strict=True)]
        )
        places = places.to(device)
        turns = torch.randn(2 * rows, 1, dim // 4 * 2, generator=_generator())
        angles = turns.cos().to(device, dtype), turns.sin().to(device, dtype)
        k, v = q[:, :_HEADS] * 2, (q / 2)[:, -_HEADS:]  # their strides differ
        keys, queries = rotate(k, *angles), rotate(q, *angles)
        rotated = kernels.write(q, k, v, angles, table, 0, places)
        _check_close(f"rotation in {dtype}", rotated / 8, queries / 8)  # numbers of up to 8
        outs = kernels.attend(rotated, table, 0, places)
        windowed = kernels.attend(rotated, table, 0, places, _WINDOW)
        for index, (_, count) in enumerate(sizes):
            own, end = slice(index * rows, index * rows + count), _RECENT + count
            window, raw, *_ = buffers[index]
            written = before.clone()
            written[:, :, _RECENT:end] = torch.stack((keys[own], v[own])).transpose(1, 2)
            # the last slot is for padding
            _check_close(f"written KV in {dtype}", window[:, :, :-1] / 8, written[:, :, :-1] / 8)
            written[0, :, _RECENT:end] = k[own].transpose(0, 1)
            if not torch.equal(raw[:, :-1], written[0, :, :-1]):
                raise RuntimeError(f"keys before rotation in {dtype} are written incorrectly")
            if outs[0][own.stop : (index + 1) * rows].any():
                raise RuntimeError(f"attention to slots in {dtype} is wrong for padding")
            if count == 0:
                continue
            visible = torch.cat((selected[index], window[:, :, :end]), dim=2)[:, :, firsts[index] :]
            k_seen, v_seen = visible.transpose(1, 2)
            full = partial_attention(rotated[own], k_seen, v_seen, causal=True)
            _check_partial(f"attention to slots in {dtype}", _rows(outs, own), full)
            expected = windowed_attention(rotated[own], k_seen, v_seen, _WINDOW)
            _check_partial(f"attention to windows in {dtype}", _rows(windowed, own), expected)


def _slot_buffers(kv: Tensor, offset: int, slots: int) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the first `slots` of kv (2, H, N, D) as in 8 bits, and the buffers of a SlotTable.

    KV in 16 bits is what starts at `offset`.
    """
    selected, window = kv[:, :, :slots].contiguous(), kv[:, :, offset:].clone()
    if not slots:
        return selected, (window, window[0].clone(), None, None)
    codes = torch.empty_like(selected, dtype=torch.int8)
    scales = torch.empty_like(selected[..., :1])
    quantise(selected, codes, scales)
    dequantise(codes, scales, selected)
    return selected, (window, window[0].clone(), codes, scales)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _inputs(
    device: torch.device, dtype: torch.dtype, tokens: int, dim: int, rows: int, groups: int
) -> tuple[Tensor, Tensor]:
    """Return keys and values (2, H, N, D), and queries (T, H * groups, D)."""
    generator = _generator()
    kv = torch.randn(2, _HEADS, tokens, dim, generator=generator)
    q = torch.randn(rows, _HEADS * groups, dim, generator=generator)
    return kv.to(device, dtype), q.to(device, dtype)


def _rows(partial: Partial, rows: slice) -> Partial:
    return partial[0][rows], partial[1][rows]


def _check_partial(name: str, actual: Partial, expected: Partial) -> None:
    """Raise RuntimeError if attention or its log-sum-exp is not close to the expected one."""
    _check_close(name, actual[0], expected[0])
    _check_close(f"log-sum-exp of {name}", actual[1], expected[1], expected[0].dtype)


def _check_close(
    name: str, actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None
) -> None:
    """Raise RuntimeError if a result is not close to the expected one, computed in `dtype`."""
    error = (actual.float() - expected.float()).abs().max().item()
    in_32_bits = (dtype or expected.dtype) == torch.float32
    if not error < (_TOLERANCE_IN_32_BITS if in_32_bits else _TOLERANCE):
        raise RuntimeError(f"{name} is off by {error:.3g}")
