"""Compile the fused kernels for GPUs that need not be there: run as a module, without a device.

Triton's interpreter takes what its compiler refuses.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from offload import slice_kernels

GENERATIONS = (80, 89, 90)  # compute capabilities: A100, RTX 4090, H100
ELEMENTS = {"bf16": {"LOW_BITS": 4, "SHARED": True}, "fp16": {"LOW_BITS": 8, "SHARED": False}}
SIZES = {"BLOCK": 1024, "GROUPS": 4, "ROWS": 16, "KEYS": 64, "DIM": 128, "WIDENS": False}
POINTERS = {"codes": "*u8", "lows": "*u8", "offsets": "*i32", "out": "*i16"}
POINTERS |= {"outs": "*fp32", "lses": "*fp32", "scale": "fp32"}


def compiled(kernel: Any, element: str, generation: int) -> Any:
    """Return a kernel's machine code for elements of this kind."""
    given = SIZES | ELEMENTS[element]
    constants = {name: given[name] for name in kernel.arg_names if name in given}
    types = {"q": f"*{element}", **POINTERS}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", generation, 32)).asm["cubin"]


if __name__ == "__main__":
    for generation in GENERATIONS:
        for kernel in (slice_kernels._join, slice_kernels._attend):
            element = "fp16" if generation == GENERATIONS[0] else "bf16"
            assert compiled(kernel, element, generation)
    print("compiled")
