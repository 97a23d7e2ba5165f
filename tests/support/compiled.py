"""Compile the fused kernels for GPUs that need not be there: run as a module, without a device.

Triton's interpreter takes what its compiler refuses. Whether `all` shapes are compiled, for all
generations, or just the `first` for one, the argument says.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from offload.kernels import batch_invariant as batch_invariant_kernels
from offload.kernels import split_float as split_kernels
from offload.kernels.batch_invariant_shape import KEY_BLOCK, ROW_BLOCK
from offload.layout import ceil_div

GENERATIONS = {80: 166_912, 89: 101_376, 90: 232_448}  # A100, RTX 4090, H100: bytes of a block
PROCESSOR, RESERVED = 102_400, 1_024  # of an RTX 4090: bytes of a processor, and CUDA's of a block
ELEMENTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SPLIT = {"bf16": {"LOW_BITS": 4, "SHARED": True}, "fp16": {"LOW_BITS": 8, "SHARED": False}}
SIZES = {"BLOCK": 1024, "GROUPS": 4, "ROWS": 16, "KEYS": 64, "DIM": 128, "UPCAST": False}
# of attention to codes: elements, rows and dimensions of a block
BLOCKS = {
    80: [("fp16", 16, 64)],
    89: [
        *(("bf16", rows, columns) for columns in (128, 256) for rows in (16, 32, 64)),
        ("fp16", 64, 64),
    ],
    90: [("bf16", 64, 128)],
}
# numbers that are multiples of 16, as a launch finds: only then are tiles of codes loaded ahead
MULTIPLES = {"dim", "count"}
MULTIPLES |= {"high_part", "high_head", "low_part", "low_head", "out_part", "out_head"}
POINTERS = {"high": "*u8", "low": "*u8", "offsets": "*i32", "out": "*i16"}
POINTERS |= {"outs": "*fp32", "lses": "*fp32", "scale": "fp32"}
# of steady attention: elements, dimensions of a head, and query heads to a KV head
STEADY = {
    80: [("fp16", 128, 1)],
    89: [
        *(("bf16", 64, 3), ("bf16", 80, 1), ("bf16", 128, 4), ("bf16", 128, 16)),
        *(("bf16", 256, 8), ("fp32", 128, 8), ("fp32", 256, 8)),
    ],
    90: [("bf16", 128, 8)],
}


def compiled(
    kernel: Any, element: str, generation: int, sizes: dict[str, Any], **options: int
) -> Any:
    """Return a kernel compiled for elements of this kind, which fits such a GPU."""
    constants = {name: sizes[name] for name in kernel.arg_names if name in sizes}
    types = dict.fromkeys(("q", "prefix", "recent", "attended"), f"*{element}") | POINTERS
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    for each in kernel.params:
        # else a launch of the self-test would not compile what a model's launches need
        varies = signature[each.name] == "i32" and each.name not in MULTIPLES
        assert each.do_not_specialize or not varies, each.name
    # memory on a GPU begins at multiples of 16 bytes, and so do tokens in it
    aligned = {
        (each.num,): [["tt.divisibility", 16]]
        for each in kernel.params
        if signature[each.name].startswith("*")
        or (each.name in MULTIPLES and not each.do_not_specialize)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    target = GPUTarget("cuda", generation, 32)
    made = triton.compile(source, target=target, options=options or None)
    assert made.metadata.shared <= GENERATIONS[generation], (element, sizes, made.metadata.shared)
    return made


def codes(generation: int, shapes: int | None) -> None:
    """Compile attention to codes: two programs fit a processor up to head dimension 128."""
    for element, rows, columns in BLOCKS[generation][:shapes]:
        sizes = SIZES | SPLIT[element] | {"ROWS": rows, "DIM": columns}
        ahead = split_kernels.stages(rows, columns)
        made = compiled(split_kernels._attend, element, generation, sizes, num_stages=ahead)
        if generation == 89 and columns <= 128:
            assert 2 * (made.metadata.shared + RESERVED) <= PROCESSOR, (rows, columns)


def steady(generation: int, shapes: int | None) -> None:
    """Compile the kernels for steady attention in shapes in which they are launched."""
    for element, dim, groups in STEADY[generation][:shapes]:
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
            "TILE": batch_invariant_kernels._TILE,
        }
        sizes |= {"COLUMNS": columns, "UPCAST": False}
        compiled(batch_invariant_kernels._attend, element, generation, sizes, num_stages=1)
        compiled(batch_invariant_kernels._merge, element, generation, sizes)


if __name__ == "__main__":
    extents: dict[str, Any] = {"first": ([89], 1), "all": (GENERATIONS, None)}
    generations, shapes = extents[sys.argv[1]]
    for generation in generations:
        element = "fp16" if generation == 80 else "bf16"
        compiled(split_kernels._reconstruct, element, generation, SIZES | SPLIT[element])
        codes(generation, shapes)
        steady(generation, shapes)
    print("compiled")
