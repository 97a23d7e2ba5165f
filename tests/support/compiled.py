"""Compile the fused kernels for a GPU without one: `python -m support.compiled 80|89|90 [PART]`.

Triton's interpreter accepts code that its compiler rejects. Products with packed weights are
compiled in all formats for the RTX 4090, and in every sixth for others.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from offload.attention import merge_kernel
from offload.codec.int8 import LARGEST, scale_limits
from offload.kernels import batch_invariant as batch_invariant_kernels
from offload.kernels import retrieval as retrieval_kernels
from offload.kernels import slot_attention as slot_kernels
from offload.kernels import split_attention, tiles
from offload.kernels import split_float as split_kernels
from offload.kernels.batch_invariant_shape import KEY_BLOCK, ROW_BLOCK
from offload.layout import ceil_div
from parallel.formats.plane_format import PLANE_FORMATS, group_format
from parallel.weights import kernels as weight_kernels

# maximum shared memory of a block on the A100, RTX 4090 and H100, by compute capability
MAX_SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448}
SM_SHARED_BYTES = 102_400  # shared memory of an SM of the RTX 4090
RESERVED_BYTES = 1_024  # CUDA's own share of it per block
ELEMENTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SPLIT = {"bf16": {"LOW_BITS": 4, "SHARED": True}, "fp16": {"LOW_BITS": 8, "SHARED": False}}
SIZES = {"BLOCK": 1024, "GROUPS": 4, "ROWS": 16, "KEYS": 64, "DIM": 128, "UPCAST": False}
# attention over high bytes: dtype, rows and dimensions of a block
SPLIT_SHAPES = {
    80: [("fp16", 16, 64)],
    89: [
        *(("bf16", rows, columns) for columns in (128, 256) for rows in (16, 32, 64)),
        ("fp16", 64, 64),
        ("bf16", 16, 512),
    ],
    90: [("bf16", 64, 128)],
}
# arguments that are multiples of 16, as at a launch: tiles of high bytes are only prefetched then
MULTIPLES = {"dim", "count"}
MULTIPLES |= {
    f"{name}_{axis}"
    for name in ("kv", "high", "low", "out", "prefix", "codes")
    for axis in ("part", "head")
}
MULTIPLES |= {"key_head", "columns", "stride"}
POINTERS = {"kv": "*i16", "high": "*u8", "low": "*u8", "offsets": "*i32", "out": "*i16"}
POINTERS |= {"outliers": "*u8", "positions": "*i32", "patterns": "*i16", "starts": "*i32"}
POINTERS |= {"outs": "*fp32", "lses": "*fp32", "other_lse": "*fp32", "lse": "*fp32"}
POINTERS |= {"table": "*i64", "places": "*i64", "totals": "*fp32"}
POINTERS |= {"scale": "fp32", "chunks": "*i64", "codes": "*i8", "results": "*fp32"}
POINTERS |= {"previous": "*fp32", "decay": "fp32"}
ELEMENT_POINTERS = ("q", "prefix", "recent", "attended", "other_out", "merged", "keys", "scales")
ELEMENT_POINTERS += ("k", "v", "cos", "sin", "turned")
# arguments of attention over high bytes that are None without selected keys
SELECTED = ("lows", "places", "low_tokens", "places_head", "place_count", "chunk")
# arguments of chunk scores that are None without previous ones
PREVIOUS = ("previous",)
# batch-invariant attention: dtype, head dimension, and query heads per KV head
BATCH_INVARIANT_SHAPES = {
    80: [("fp16", 128, 1)],
    89: [
        *(("bf16", 64, 3), ("bf16", 80, 1), ("bf16", 128, 4), ("bf16", 128, 16)),
        *(("bf16", 256, 8), ("fp32", 128, 8), ("fp32", 256, 8), ("bf16", 512, 8)),
    ],
    90: [("bf16", 128, 8)],
}


def compile_kernel(
    kernel: Any,
    element: str,
    capability: int,
    sizes: dict[str, Any],
    pointers: dict[str, str] | None = None,
    **options: int,
) -> Any:
    """Compile a kernel for this dtype and compute capability, and check that it fits the GPU."""
    constants = {name: sizes[name] for name in kernel.arg_names if name in sizes}
    types = dict.fromkeys(ELEMENT_POINTERS, f"*{element}") | POINTERS | (pointers or {})
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    for each in kernel.params:
        # a specialized argument: the self-test's launches would not compile a model's variant
        varies = signature[each.name] == "i32" and each.name not in MULTIPLES
        assert each.do_not_specialize or not varies, each.name
    # GPU memory, and each token in it, starts at a multiple of 16 bytes
    aligned = {
        (each.num,): [["tt.divisibility", 16]]
        for each in kernel.params
        if not each.do_not_specialize
        and (signature[each.name].startswith("*") or each.name in MULTIPLES)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    binary = triton.compile(source, target=target, options=options or None)
    shared = binary.metadata.shared
    assert shared <= MAX_SHARED_BYTES[capability], (element, sizes, shared)
    return binary


def compile_split_kernels(capability: int) -> None:
    """Compile attention over high bytes; two programs fit an SM up to head dimension 128."""
    kernel = split_attention._attend
    pointers = {"lows": "*u8", "places": "*i32"}
    for element, rows, columns in SPLIT_SHAPES[capability]:
        sizes = SIZES | SPLIT[element] | {"ROWS": rows, "DIM": columns}
        sizes["KEYS"] = tiles.tile_sizes(columns)[1]
        sizes["LOW_BYTES"] = columns * sizes["LOW_BITS"] // 8
        for absent in ((), SELECTED):
            options = tiles.launch_options(rows, columns, has_low_bits=not absent)
            variant = sizes | dict.fromkeys(absent)
            binary = compile_kernel(kernel, element, capability, variant, pointers, **options)
            assert "ld.global.b8" not in binary.asm["ptx"]  # several bytes are loaded at a time
            if capability == 89 and columns <= 128:
                block_bytes = binary.metadata.shared + RESERVED_BYTES
                assert 2 * block_bytes <= SM_SHARED_BYTES, (rows, columns)


def compile_batch_invariant_kernels(capability: int) -> None:
    """Compile batch-invariant attention in shapes in which it is launched."""
    for element, dim, groups in BATCH_INVARIANT_SHAPES[capability]:
        columns = triton.next_power_of_2(dim)
        rows = batch_invariant_kernels.program_rows(groups, columns, ELEMENTS[element])
        sizes = {
            "GROUPS": groups,
            "ROW_BLOCK": ROW_BLOCK,
            "KEY_BLOCK": KEY_BLOCK,
            "ROWS": rows,
            "DIM": dim,
        }
        sizes |= {
            "TILES": ceil_div(ROW_BLOCK * groups, rows),
            "TILE": batch_invariant_kernels.tile_keys(columns),
        }
        sizes |= {"COLUMNS": columns, "UPCAST": False}
        compile_kernel(batch_invariant_kernels._attend, element, capability, sizes, num_stages=1)
        compile_kernel(batch_invariant_kernels._merge, element, capability, sizes)


def compile_retrieval_kernels(capability: int, element: str) -> None:
    """Compile the retrieval cache's kernels for eight and for one query head per KV head."""
    smallest, largest = scale_limits(ELEMENTS[element])
    for groups, columns in ((8, 128), (1, 64), (8, 256)):
        sizes = {"GROUPS": groups, "MEMBERS": max(2, groups), "QUERIES": 8, "KEYS": 64}
        sizes |= {"DIM": columns, "UPCAST": False, "CHUNK": 8, "TILES": 8, "TOKENS": 16}
        sizes |= {"LARGEST": LARGEST, "SMALLEST_SCALE": smallest, "LARGEST_SCALE": largest}
        for causal in (False, True):
            causal_sizes = sizes | {"CAUSAL": causal}
            compile_kernel(retrieval_kernels._sum_weights, element, capability, causal_sizes)
        for previous in ({}, dict.fromkeys(PREVIOUS)):
            compile_kernel(retrieval_kernels._score, element, capability, sizes | previous)
        compile_kernel(retrieval_kernels._store_int8, element, capability, sizes)
        low_bits = sizes | SPLIT[element]
        lows = {"keys": "*i16", "lows": "*u8"}
        compile_kernel(retrieval_kernels._store_lows, element, capability, low_bits, lows)


def compile_slot_kernels(capability: int) -> None:
    """Compile attention to slots; two programs fit an SM up to head dimension 128."""
    for element, rows, columns in SPLIT_SHAPES[capability]:
        options = tiles.launch_options(rows, columns)
        for codes in (True, False):
            sizes = SIZES | {"ROWS": rows, "DIM": columns, "CODES": codes}
            sizes["KEYS"] = tiles.tile_sizes(columns)[1]
            binary = compile_kernel(slot_kernels._attend, element, capability, sizes, **options)
            assert "ld.global.v4" in binary.asm["ptx"]  # addresses from a table are aligned, too
            if capability == 89 and columns <= 128:
                block_bytes = binary.metadata.shared + RESERVED_BYTES
                assert 2 * block_bytes <= SM_SHARED_BYTES, (rows, columns)
        for kernel in (slot_kernels._write, slot_kernels._merge):
            compile_kernel(kernel, element, capability, {"DIM": columns, "SPLITS": 64})


def compile_weight_kernels(capability: int, element: str) -> None:
    """Compile products with matrices in planes, and unpacking, of formats."""
    groups = [
        group_format("int4", 128, "float16", has_zero=True),
        group_format("int8", 0, "float32", has_zero=False),
        group_format("e4m3", 128, "bfloat16", has_zero=False),
    ]
    formats = [*PLANE_FORMATS.values(), *filter(None, groups)]
    for fmt in formats[:: 1 if capability == 89 else 6]:
        sizes = weight_kernels.constants(fmt) | {"UPCAST": False, "BLOCK": 1024}
        planes = {"low": "*i8" if fmt.bits == 8 else "*u8", "high": "*i32", "floats": "*fp32"}
        types = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}
        planes["scale"] = types[fmt.scale_type]
        zeros = "*i8" if fmt.bits == 8 else "*u8"
        planes["minimum"] = zeros if fmt.has_zero else "*fp16"
        planes |= {"sub": "*i8" if fmt.sub_kind == "int8" else "*u8", "submin": "*u8"}
        planes |= {"x": f"*{element}", "out": f"*{element}", "sums": "*fp32"}
        planes |= {"order": "*i64", "ends": "*i64"}
        for tokens, experts in ((1, True), (16, False), (32, False), (64, False)):
            tile = sizes | weight_kernels.tile(tokens) | {"EXPERTS": experts}
            compile_kernel(
                weight_kernels._multiply,
                element,
                capability,
                tile,
                planes,
                **weight_kernels.OPTIONS,
            )
        compile_kernel(
            weight_kernels._unpack, element, capability, sizes | weight_kernels.UNPACK_TILE, planes
        )
        compile_kernel(weight_kernels._sum, element, capability, sizes, planes)


if __name__ == "__main__":
    capability = int(sys.argv[1])
    (part,) = sys.argv[2:] or ["all"]  # split, others
    element = "fp16" if capability == 80 else "bf16"
    if part != "others":
        sizes = SIZES | SPLIT[element] | {"MIN_HIGH": 8, "MAX_HIGH": 0x7E}
        elements = split_kernels._split, split_kernels._write_outliers, split_kernels._reconstruct
        for kernel in elements:
            compile_kernel(kernel, element, capability, sizes)
        for outs in ("fp32", element):  # parts of split layers, and others
            pointers = {"outs": f"*{outs}"}
            compile_kernel(merge_kernel._merge, element, capability, sizes, pointers)
        compile_split_kernels(capability)
    if part != "split":
        compile_batch_invariant_kernels(capability)
        compile_slot_kernels(capability)
        compile_retrieval_kernels(capability, element)
        compile_weight_kernels(capability, element)
    print("compiled")
