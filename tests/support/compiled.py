"""Compile the fused kernels for GPUs that need not be there: run as a module, without a device.

Triton's interpreter takes what its compiler refuses.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from offload import slice_kernels, steady_kernels
from offload.layout import ceil_div
from offload.steady_shape import KEYS, WIDTH

GENERATIONS = {80: 166_912, 89: 101_376, 90: 232_448}  # A100, RTX 4090, H100: bytes of a block
SLICED = {"bf16": {"LOW_BITS": 4, "SHARED": True}, "fp16": {"LOW_BITS": 8, "SHARED": False}}
SIZES = {"BLOCK": 1024, "GROUPS": 4, "ROWS": 16, "KEYS": 64, "DIM": 128, "WIDENS": False}
BLOCKS = [(16, 64), (32, 128), (64, 128), (64, 256)]  # rows and dimensions of attention to codes
POINTERS = {"codes": "*u8", "lows": "*u8", "offsets": "*i32", "out": "*i16"}
POINTERS |= {"outs": "*fp32", "lses": "*fp32", "scale": "fp32"}
# of steady attention: elements, dimensions of a head, and query heads to a KV head
STEADY = {
    80: [("fp16", 128, 1)],
    89: [("bf16", 64, 3), ("bf16", 80, 1), ("bf16", 128, 4), ("bf16", 128, 16), ("fp32", 128, 8)],
    90: [("bf16", 128, 8)],
}


def compiled(
    kernel: Any, element: str, generation: int, sizes: dict[str, Any], **options: int
) -> Any:
    """Return a kernel's machine code for elements of this kind, which fits such a GPU."""
    constants = {name: sizes[name] for name in kernel.arg_names if name in sizes}
    types = dict.fromkeys(("q", "prefix", "recent", "attended"), f"*{element}") | POINTERS
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    # memory on a GPU begins at multiples of 16 bytes, and so do tokens in it
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    target = GPUTarget("cuda", generation, 32)
    made = triton.compile(source, target=target, options=options or None)
    assert made.metadata.shared <= GENERATIONS[generation], (element, sizes, made.metadata.shared)
    return made.asm["cubin"]


def steady(generation: int) -> None:
    """Compile the kernels for steady attention in shapes in which they are launched."""
    for element, dim, groups in STEADY[generation]:
        rows = steady_kernels.program_rows(groups)
        sizes = {"GROUPS": groups, "WIDTH": WIDTH, "SPAN": KEYS, "ROWS": rows, "DIM": dim}
        sizes |= {"TILES": ceil_div(WIDTH * groups, rows), "TILE": steady_kernels._TILE}
        sizes |= {"COLUMNS": triton.next_power_of_2(dim), "WIDENS": False}
        assert compiled(steady_kernels._attend, element, generation, sizes, num_stages=1)
        assert compiled(steady_kernels._merge, element, generation, sizes)


if __name__ == "__main__":
    for generation in GENERATIONS:
        element = "fp16" if generation == 80 else "bf16"
        assert compiled(slice_kernels._join, element, generation, SIZES | SLICED[element])
        for rows, dim in BLOCKS:
            sizes = SIZES | SLICED[element] | {"ROWS": rows, "DIM": dim}
            assert compiled(slice_kernels._attend, element, generation, sizes)
        steady(generation)
    print("compiled")
