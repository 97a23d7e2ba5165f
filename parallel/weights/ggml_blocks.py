"""Splitting of ggml's blocks into planes.

Source of the layouts: ggml-common.h of github.com/ggml-org/ggml, and the dequantisers of its
Python package gguf.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parallel.formats.plane_format import GROUP
from parallel.formats.tensors import Parts


def split_blocks(name: str, raw: Tensor) -> Parts:
    """Return the codes of blocks, a byte each, with their scales and minima.

    Args:
        name: of a type in PLANE_FORMATS.
        raw: blocks (R, B, bytes of a block) uint8.

    Returns:
        codes (R, columns), of 8 bits with their sign in two's complement; scale and minimum
        (R, columns / (GROUP * scale_groups)) float16; sub and submin (R, columns / sub) uint8.
    """
    parts = _SPLITS[name](raw)
    return {part: values.flatten(1) for part, values in parts.items()}


def pack_codes(codes: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """Return codes (R, K) uint8 as the planes `low` and `high`.

    Of 4 to 6 bits, low (R, K / 2) has the low 4 bits of each weight of a group's first half beside
    those of its second half. high (R, K / GROUP * (bits - 4)) int32 has the other bits: of 5, one
    number per group, its bit i that of weight i; of 6, one per half, its bits 2 i and 2 i + 1.
    """
    if bits == 8:
        return codes.view(torch.int8), None
    grouped = codes.unflatten(1, (-1, 2, GROUP // 2))  # (R, groups, 2, 16)
    low = (grouped[:, :, 0] & 15) | (grouped[:, :, 1] << 4)
    if bits == 4:
        return low.flatten(1), None
    per_byte = 8 // (bits - 4)
    fields = (grouped >> 4).reshape(len(codes), -1, per_byte)
    packed = fields[..., 0].clone()
    for index in range(1, per_byte):
        packed |= fields[..., index] << (8 // per_byte * index)
    return low.flatten(1), packed.view(torch.int32)


def fields(data: Tensor, size: int, width: int) -> Tensor:
    """Return fields of `size` bits (R, B, n), the lowest of `width` bytes (R, B, bytes) first.

    The bits above a field remain. Shifts are made on the device: copies would forbid CUDA graphs.
    """
    shift = torch.arange(0, 8, size, dtype=torch.uint8, device=data.device)[:, None]
    return (data.unflatten(2, (-1, 1, width)) >> shift).flatten(2)


def nibbles(data: Tensor, width: int) -> Tensor:
    """Return the halves (R, B, 2 n) of bytes (R, B, n): the low ones of `width` bytes first."""
    return fields(data, 4, width) & 15


def bits(data: Tensor) -> Tensor:
    """Return the bits (R, B, 8 n) of bytes (R, B, n), the lowest first."""
    return fields(data, 1, 1) & 1


def halves(data: Tensor) -> Tensor:
    """Return the float16 numbers in bytes (R, B, 2 n)."""
    return data.contiguous().view(torch.float16)


def _q4_0(raw: Tensor) -> Parts:
    return {"scale": halves(raw[..., :2]), "codes": nibbles(raw[..., 2:], 16)}


def _q4_1(raw: Tensor) -> Parts:
    scale, minimum = halves(raw[..., :4]).split(1, dim=2)
    return {"scale": scale, "minimum": minimum, "codes": nibbles(raw[..., 4:], 16)}


def _q5_0(raw: Tensor) -> Parts:
    codes = nibbles(raw[..., 6:], 16) | (bits(raw[..., 2:6]) << 4)
    return {"scale": halves(raw[..., :2]), "codes": codes}


def _q5_1(raw: Tensor) -> Parts:
    scale, minimum = halves(raw[..., :4]).split(1, dim=2)
    codes = nibbles(raw[..., 8:], 16) | (bits(raw[..., 4:8]) << 4)
    return {"scale": scale, "minimum": minimum, "codes": codes}


def _q8_0(raw: Tensor) -> Parts:
    return {"scale": halves(raw[..., :2]), "codes": raw[..., 2:]}


def _k_scales(raw: Tensor) -> Parts:
    """Return scales and minima of Q4_K and Q5_K: 6 bits each in 12 bytes, after two float16."""
    scale, minimum = halves(raw[..., :4]).split(1, dim=2)
    first, second, both = raw[..., 4:16].split(4, dim=2)
    sub = torch.cat((first & 63, (both & 15) | (first >> 2 & 48)), dim=2)
    submin = torch.cat((second & 63, (both >> 4) | (second >> 2 & 48)), dim=2)
    return {"scale": scale, "minimum": -minimum, "sub": sub, "submin": submin}


def _q4_k(raw: Tensor) -> Parts:
    return {**_k_scales(raw), "codes": nibbles(raw[..., 16:], 32)}


def _q5_k(raw: Tensor) -> Parts:
    high = fields(raw[..., 16:48], 1, 32) & 1
    return {**_k_scales(raw), "codes": nibbles(raw[..., 48:], 32) | (high << 4)}


def _q6_k(raw: Tensor) -> Parts:
    high = fields(raw[..., 128:192], 2, 32) & 3
    codes = nibbles(raw[..., :128], 64) | (high << 4)
    return {"scale": halves(raw[..., 208:]), "sub": raw[..., 192:208], "codes": codes}


def _iq4_xs(raw: Tensor) -> Parts:
    sub = (nibbles(raw[..., 4:8], 1) | (fields(raw[..., 2:4], 2, 1) & 3) << 4) - 32
    return {"scale": halves(raw[..., :2]), "sub": sub, "codes": nibbles(raw[..., 8:], 16)}


def _mxfp4(raw: Tensor) -> Parts:
    return {"sub": raw[..., :1], "codes": nibbles(raw[..., 1:], 16)}


def _nvfp4(raw: Tensor) -> Parts:
    return {"sub": raw[..., :4], "codes": nibbles(raw[..., 4:], 8)}


_SPLITS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _q4_0,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
