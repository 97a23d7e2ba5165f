"""Fused GPU kernels for matrices in planes: products with few rows, and unpacking.

A program unpacks a tile of the matrix in registers, to the very bits of `Planes.unpack`, and
multiplies it with all rows of x at once: weights are read once, as stored; an expert's once for 16
rows that chose it. The sum over columns has one order whatever the number of rows, so a row's
result does not depend on the others. Importing this needs triton, which comes with CUDA builds of
torch.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.kernels.tiles import UPCAST
from offload.layout import ceil_div
from parallel.formats.plane_format import PlaneFormat
from parallel.weights.planes import Planes, float_bytes
from parallel.weights.routing import Routing

MAX_ROWS = 64  # rows of x; with more, unpacking first is faster
_TILE_ROWS = 64  # rows of the matrix per program
_TILE_GROUPS = 2  # groups of each that are unpacked at once
_SPLIT_GROUPS = 32  # smallest number of groups per program
_PROGRAMS = 512  # target number of programs: four for each multiprocessor of a 4090
OPTIONS = {"num_warps": 4, "num_stages": 3}
UNPACK_TILE = {"ROWS": 4, "GROUPS": 16}  # tile of a program that unpacks


def multiply(x: Tensor, planes: Planes, first: int, out_dtype: torch.dtype) -> Tensor:
    """Return x W^T (T, R - first), of the matrix's rows from `first` on.

    Args:
        x: up to MAX_ROWS rows (T, columns) in 16 bits; the matrix is rounded to their dtype.
        planes: the matrix (R, columns).
        first: rows to skip.
        out_dtype: of the result; sums are float32.
    """
    fixed = planes.fixed or _fix(planes)
    splits = split_count(fixed.rows, fixed.groups)
    out = torch.empty(len(x), fixed.rows - first, dtype=out_dtype, device=x.device)
    _launch(x, fixed, out, splits, first)
    return out


def multiply_experts(
    x: Tensor, planes: Planes, routing: Routing, rows: int, repeats: int
) -> Tensor:
    """Return the products (S, rows) of rows of x with one expert's matrix each, in x's dtype.

    Args:
        x: rows (S / repeats, columns) in 16 bits, of which each is multiplied `repeats` times.
        planes: the matrices (experts * rows, columns).
        routing: the expert of each product.
        rows: of an expert.
        repeats: experts of a row of x.
    """
    fixed = planes.fixed or _fix(planes)
    splits = split_count(rows, fixed.groups)
    out = torch.empty(len(routing.order), rows, dtype=x.dtype, device=x.device)
    _launch(x, fixed, out, splits, routing=routing, repeats=repeats)
    return out


def _launch(
    x: Tensor,
    fixed: _Fixed,
    out: Tensor,
    splits: int,
    first: int = 0,
    routing: Routing | None = None,
    repeats: int = 1,
) -> None:
    """Write products into `out`: of all rows of x with a matrix, or of each with an expert's."""
    count, rows = out.shape
    x, sums = x.contiguous(), out
    order, ends = (x, x) if routing is None else (routing.order, routing.ends)
    experts = 1 if routing is None else len(ends)
    if splits > 1:
        sums = torch.empty(splits, count, rows, dtype=torch.float32, device=x.device)
    _multiply[(ceil_div(rows, _TILE_ROWS), splits, experts)](
        x,
        *fixed.planes,
        sums,
        order,
        ends,
        count,
        first,
        rows,
        repeats,
        fixed.columns,
        fixed.groups,
        fixed.lead,
        ceil_div(ceil_div(fixed.groups, splits), _TILE_GROUPS) * _TILE_GROUPS,
        **tile(count if routing is None else 1),
        EXPERTS=routing is not None,
        UPCAST=UPCAST,
        **fixed.constants,
        **OPTIONS,
    )
    if splits > 1:
        total = count * rows
        _sum[(ceil_div(total, 1024),)](sums, out, splits, total, BLOCK=1024)


def split_count(rows: int, groups: int) -> int:
    """Return the number of programs that share a tile's columns; it depends on the matrix alone."""
    tiles = ceil_div(rows, _TILE_ROWS)
    return max(1, min(_PROGRAMS // tiles, groups // _SPLIT_GROUPS))


def unpack(planes: Planes, first: int, out: Tensor) -> Tensor:
    """Write the matrix's rows from `first` on into `out` (rows, columns), in its dtype."""
    fixed = planes.fixed or _fix(planes)
    grid = tuple(map(ceil_div, (len(out), fixed.groups), UNPACK_TILE.values()))
    _unpack[grid](
        *fixed.planes,
        out,
        first,
        first + len(out),
        out.stride(0),
        fixed.groups,
        fixed.lead,
        **UNPACK_TILE,
        **fixed.constants,
        num_warps=4,
    )
    return out


class _Fixed(NamedTuple):
    """What all launches with a matrix have in common; making it takes longer than a launch."""

    planes: list[Tensor]  # in a kernel's order; any tensor for those that it does not read
    rows: int
    columns: int
    groups: int
    lead: int
    constants: dict[str, Any]


def _fix(planes: Planes) -> _Fixed:
    fmt, device = planes.format, planes.low.device
    named = [planes.low, planes.high, planes.scale, planes.minimum, planes.sub, planes.submin]
    named.append(float_bytes(fmt.sub_kind, device) if fmt.has_float_subs else None)
    tensors = [planes.low.data if each is None else each.data for each in named]
    sizes = planes.rows, planes.columns, planes.groups, planes.lead
    planes.fixed = _Fixed(tensors, *sizes, constants(fmt))
    return planes.fixed


def tile(tokens: int) -> dict[str, int]:
    """Return the tile of a program that multiplies `tokens` rows of x."""
    columns = max(16, triton.next_power_of_2(tokens))
    return {"ROWS": _TILE_ROWS, "GROUPS": _TILE_GROUPS, "TOKENS": columns}


def constants(fmt: PlaneFormat) -> dict[str, Any]:
    """Return the compile-time constants of a format."""
    return {
        "BITS": fmt.bits,
        "OFFSET": 128 if fmt.values else fmt.offset,
        "VALUES": _words(fmt.values) if fmt.values else None,
        "SCALE_GROUPS": fmt.scale_groups,
        "SUB": fmt.sub,
        "SUB_FLOATS": fmt.has_float_subs,
        "HAS_MINIMUM": fmt.has_minimum,
        "HAS_ZERO": fmt.has_zero,
        "FLOATS": fmt.is_float,
    }


def _words(values: tuple[int, ...]) -> tuple[int, ...]:
    """Return 16 values, each plus 128 in a byte, as four words."""
    data = bytes(value + 128 for value in values)
    return struct.unpack("<4i", data)


@triton.jit
def _tile(
    low,
    high,
    scale,
    minimum,
    sub,
    submin,
    floats,
    row,
    group,
    end,
    groups,
    lead,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    VALUES: tl.constexpr,
    SCALE_GROUPS: tl.constexpr,
    SUB: tl.constexpr,
    SUB_FLOATS: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    FLOATS: tl.constexpr,
):
    """Return the first halves (R, G, 16) float32 of groups (1, G, 1) of rows (R, 1, 1), and the
    second halves. Groups past the last, and rows from `end` on, are zero or finite.
    """
    lane = tl.arange(0, 16)[None, None, :]
    exists = (row < end) & (group < groups)
    place = row.to(tl.int64) * groups + group
    if BITS == 8:
        first = _byte_value(tl.load(low + place * 32 + lane, mask=exists, other=0), FLOATS)
        second = _byte_value(tl.load(low + place * 32 + 16 + lane, mask=exists, other=0), FLOATS)
    else:
        packed = tl.load(low + place * 16 + lane, mask=exists, other=0).to(tl.int32)
        code = packed & 15
        next_code = packed >> 4
        if BITS == 5:
            bits = tl.load(high + place, mask=exists, other=0)
            code |= ((bits >> lane) & 1) << 4
            next_code |= ((bits >> (lane + 16)) & 1) << 4
        if BITS == 6:
            code |= ((tl.load(high + place * 2, mask=exists, other=0) >> (lane * 2)) & 3) << 4
            bits = tl.load(high + place * 2 + 1, mask=exists, other=0)
            next_code |= ((bits >> (lane * 2)) & 3) << 4
        first = _value(code, OFFSET, VALUES)
        second = _value(next_code, OFFSET, VALUES)
    factor = 1.0
    shift = 0.0
    if SCALE_GROUPS > 0:
        scales = (lead + groups + SCALE_GROUPS - 1) // SCALE_GROUPS
        scale_place = row.to(tl.int64) * scales + (lead + group) // SCALE_GROUPS
        factor = tl.load(scale + scale_place, mask=exists, other=0.0).to(tl.float32)
        if HAS_ZERO:
            zero = tl.load(minimum + scale_place, mask=exists, other=0).to(tl.float32)
            first -= zero
            second -= zero
        if HAS_MINIMUM:
            shift = tl.load(minimum + scale_place, mask=exists, other=0.0).to(tl.float32)
    if SUB == 0:
        return first * factor + shift, second * factor + shift
    if SUB == 32:
        own = _sub_scale(sub, floats, place, exists, SUB_FLOATS) * factor
        if HAS_MINIMUM:
            shift = shift * tl.load(submin + place, mask=exists, other=0).to(tl.float32)
        return first * own + shift, second * own + shift
    own = _sub_scale(sub, floats, place * 2, exists, SUB_FLOATS) * factor
    following = _sub_scale(sub, floats, place * 2 + 1, exists, SUB_FLOATS) * factor
    return first * own, second * following


@triton.jit
def _byte_value(code, FLOATS: tl.constexpr):
    """Return the values float32 of codes int8, or of the e4m3 numbers that they are.

    Shifted, an e4m3 number is a float whose exponent is too small by 127 - 7.
    """
    if not FLOATS:
        return code.to(tl.float32)
    bits = code.to(tl.int32)
    bits = ((bits & 127) << 20) | ((bits & 128) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120


@triton.jit
def _value(code, OFFSET: tl.constexpr, VALUES: tl.constexpr):
    """Return the values (R, G, 16) float32 of codes below 128.

    Or'ed into a float of 2 ** 23, whose steps are 1, a code needs no conversion, which takes four
    times as long as other operations.
    """
    shift: tl.constexpr = OFFSET + 8388608.0
    if VALUES is not None:  # bytes in four words: loading them would take seven times as long
        low_word = tl.where(code < 4, VALUES[0], VALUES[1])
        high_word = tl.where(code < 12, VALUES[2], VALUES[3])
        code = (tl.where(code < 8, low_word, high_word) >> ((code & 3) * 8)) & 255
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - shift


@triton.jit
def _sub_scale(sub, floats, place, exists, SUB_FLOATS: tl.constexpr):
    scale = tl.load(sub + place, mask=exists, other=0)
    if SUB_FLOATS:
        return tl.load(floats + scale.to(tl.int32))
    return scale.to(tl.float32)


# Specialising on argument values would compile another kernel in the middle of a request.
@triton.jit(do_not_specialize=["tokens", "first", "rows", "repeats", "groups", "lead", "per_split"])
def _multiply(
    x,
    low,
    high,
    scale,
    minimum,
    sub,
    submin,
    floats,
    out,
    order,
    ends,
    tokens,
    first,
    rows,
    repeats,
    columns,
    groups,
    lead,
    per_split,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    UPCAST: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    VALUES: tl.constexpr,
    SCALE_GROUPS: tl.constexpr,
    SUB: tl.constexpr,
    SUB_FLOATS: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    FLOATS: tl.constexpr,
):
    """Multiply a tile of rows with one split's groups of all tokens.

    With EXPERTS `tokens` is the number of products. A program has the rows of one expert, which
    follow those of the ones before it, and the products in its part of `order`; `repeats` products
    share a row of x.
    """
    HALF: tl.constexpr = GROUPS * 16
    dtype = x.dtype.element_ty
    dot_dtype = tl.float32 if UPCAST else dtype
    half = tl.arange(0, HALF)
    start = tl.program_id(1) * per_split
    token = tl.arange(0, TOKENS)
    begin = 0
    stop = TOKENS
    if EXPERTS:
        expert = tl.program_id(2)
        first = expert * rows
        begin = tl.load(ends + expert - 1, mask=expert > 0, other=0).to(tl.int32)
        stop = tl.load(ends + expert).to(tl.int32)
    end = first + rows
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for base in range(begin, stop, TOKENS):
        exists = token < tokens
        product = token
        source = token
        if EXPERTS:
            exists = base + token < stop
            product = tl.load(order + base + token, mask=exists, other=0).to(tl.int32)
            source = product // repeats
        total = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
        for tile in range(start, tl.minimum(start + per_split, groups), GROUPS):
            group = tile + tl.arange(0, GROUPS)
            one, two = _tile(
                low,
                high,
                scale,
                minimum,
                sub,
                submin,
                floats,
                row[:, None, None],
                group[None, :, None],
                end,
                groups,
                lead,
                BITS,
                OFFSET,
                VALUES,
                SCALE_GROUPS,
                SUB,
                SUB_FLOATS,
                HAS_MINIMUM,
                HAS_ZERO,
                FLOATS,
            )
            column = (tile + half // 16) * 32 + half % 16
            inside = exists[None, :] & (column < columns)[:, None]
            pointers = x + source[None, :] * columns + column[:, None]
            weights = tl.reshape(one, (ROWS, HALF)).to(dtype).to(dot_dtype)
            part = tl.load(pointers, mask=inside, other=0.0).to(dot_dtype)
            total = tl.dot(weights, part, total)
            weights = tl.reshape(two, (ROWS, HALF)).to(dtype).to(dot_dtype)
            part = tl.load(pointers + 16, mask=inside, other=0.0).to(dot_dtype)
            total = tl.dot(weights, part, total)
        place = tl.program_id(1).to(tl.int64) * tokens + product[None, :]
        result = place * rows + (row - first)[:, None]
        mask = exists[None, :] & (row < end)[:, None]
        tl.store(out + result, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["splits", "count"])
def _sum(sums, out, splits, count, BLOCK: tl.constexpr):
    """Add the sums of all splits, from the first to the last."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = element < count
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(splits):
        total += tl.load(sums + split * count + element, mask=mask, other=0.0)
    tl.store(out + element, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first", "end", "groups", "lead"])
def _unpack(
    low,
    high,
    scale,
    minimum,
    sub,
    submin,
    floats,
    out,
    first,
    end,
    stride,
    groups,
    lead,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    VALUES: tl.constexpr,
    SCALE_GROUPS: tl.constexpr,
    SUB: tl.constexpr,
    SUB_FLOATS: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    FLOATS: tl.constexpr,
):
    """Unpack a tile of groups."""
    row = (first + tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None, None]
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[None, :, None]
    one, two = _tile(
        low,
        high,
        scale,
        minimum,
        sub,
        submin,
        floats,
        row,
        group,
        end,
        groups,
        lead,
        BITS,
        OFFSET,
        VALUES,
        SCALE_GROUPS,
        SUB,
        SUB_FLOATS,
        HAS_MINIMUM,
        HAS_ZERO,
        FLOATS,
    )
    place = (row - first).to(tl.int64) * stride + group * 32 + tl.arange(0, 16)[None, None, :]
    mask = (row < end) & (group < groups)
    tl.store(out + place, one.to(out.dtype.element_ty), mask=mask)
    tl.store(out + place + 16, two.to(out.dtype.element_ty), mask=mask)
