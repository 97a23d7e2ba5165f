"""Whether a prompt's recurrent layers are computed by kernels: if these pass a self-test here."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from offload.layout import RecurrentShape
from offload.recurrent.recurrence import RecurrentRows, outputs_in_chunks
from offload.self_test import Kernels, run_self_test

_TOKENS = 200  # three chunks and a part of one
_TOLERANCE = 0.02  # largest error relative to the results; bfloat16 rounds by 0.004


@cache
def prompt_kernels(device: str, dtype: torch.dtype, shape: RecurrentShape) -> Kernels:
    """Return `offload.recurrent.prompt_kernels` if it can be used, or None, and the reason.

    Args:
        device: type of the device.
        dtype: the model's.
        shape: of the recurrent layers on this rank.
    """
    if shape.is_mamba:
        return None, "there are none for Mamba-2"
    if dtype.itemsize != 2:
        return None, f"there are none for {dtype}"
    return run_self_test("offload.recurrent.prompt_kernels", _test_prompts, device, dtype, shape)


def _test_prompts(
    kernels: ModuleType, device: torch.device, dtype: torch.dtype, shape: RecurrentShape
) -> None:
    """Raise RuntimeError if the kernels' results differ from those of plain operations."""
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    heads, keys = shape.value_heads, shape.key_dim
    q, k = (torch.nn.functional.normalize(normal(heads, _TOKENS, keys), dim=-1) for _ in range(2))
    v, state = normal(heads, _TOKENS, shape.value_dim), normal(heads, keys, shape.value_dim)
    log_decay = -0.1 * torch.rand(heads, _TOKENS, generator=generator)
    beta = torch.rand(heads, _TOKENS, generator=generator)
    rounded = (each.to(dtype).float() for each in (q, k, v))
    rows = RecurrentRows(*(each.to(device) for each in (*rounded, log_decay, beta)))
    expected_state = state.to(device)
    actual_state = expected_state.clone()
    expected = outputs_in_chunks(rows, expected_state)
    actual = kernels.outputs_in_chunks(rows, actual_state, dtype)
    pairs = {"outputs": (actual, expected), "states": (actual_state, expected_state)}
    for name, (found, right) in pairs.items():
        error = ((found - right).norm() / right.norm()).item()
        if not error < _TOLERANCE:
            raise RuntimeError(f"{name} of the gated delta rule in {dtype} are wrong by {error:g}")
