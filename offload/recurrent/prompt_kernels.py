"""The gated delta rule of prompts by fla-core's kernels, where it is installed (`[delta]`).

Source: github.com/fla-org/flash-linear-attention, fla/ops/gated_delta_rule/chunk.py.
"""

from __future__ import annotations

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from torch import Tensor

from offload.recurrent.recurrence import RecurrentRows


def outputs_in_chunks(rows: RecurrentRows, state: Tensor, dtype: torch.dtype) -> Tensor:
    """Return outputs (Hv, T, Dv) as `recurrence.outputs_in_chunks`, by products of a 16-bit dtype.

    The state (Hv, Dk, Dv) stays in float32.
    """
    q, k, v = (each.transpose(0, 1)[None].to(dtype) for each in rows[:3])  # (1, T, Hv, D)
    log_decay, beta = (each.t()[None].contiguous() for each in rows[3:5])
    out, final = chunk_gated_delta_rule(
        q, k, v, log_decay, beta, scale=1.0, initial_state=state[None], output_final_state=True
    )
    state.copy_(final[0])
    outputs: Tensor = out[0].transpose(0, 1).float()
    return outputs
