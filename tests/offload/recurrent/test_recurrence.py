"""Both recurrences equal transformers' in all their forms, which advance to equal states."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_recurrent_gated_delta_rule as recurrent_rule,
)

from offload.layout import RecurrentShape
from offload.recurrent import selection
from offload.recurrent.recurrence import (
    RecurrentInputs,
    RecurrentRows,
    advance,
    advance_by_steps,
    outputs_in_chunk,
    outputs_in_chunks,
    recurrent_rows,
    step,
)

SHAPE = RecurrentShape(frozenset({0}), 2, 6, 12, 8, 4)
MAMBA = replace(SHAPE, is_mamba=True)
SHAPES = pytest.mark.parametrize("shape", [SHAPE, MAMBA], ids=["delta", "mamba"])


def inputs_of(tokens: int, shape: RecurrentShape = SHAPE, decay: float = 0.3) -> RecurrentInputs:
    generator = torch.Generator().manual_seed(tokens)
    heads = shape.value_heads
    inputs = RecurrentInputs(
        torch.randn(tokens, shape.channels, generator=generator),
        -decay * torch.rand(tokens, heads, generator=generator),
        torch.rand(tokens, heads, generator=generator),
        torch.randn(shape.channels, shape.kernel_size, generator=generator),
    )
    if not shape.is_mamba:
        return inputs
    bias, skip = (torch.randn(size, generator=generator) for size in (shape.channels, heads))
    # Decays are those of the step sizes; channels are small, since keys are not normalised.
    log_decay, kernel = -10 * decay * inputs.beta, inputs.kernel / 4
    return inputs._replace(log_decay=log_decay, kernel=kernel, bias=bias / 4, skip=skip)


def rows_of(tokens: int, shape: RecurrentShape = SHAPE, decay: float = 0.3) -> RecurrentRows:
    before = torch.randn(shape.kernel_size - 1, shape.channels)
    return recurrent_rows(shape, inputs_of(tokens, shape, decay), before)


def reference(rows: RecurrentRows, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and the last state of transformers' recurrence."""
    if rows.skip is not None:
        return mamba_reference(rows, state)
    q, k, v = (each.transpose(0, 1)[None] for each in rows[:3])
    gates = (each.t()[None] for each in rows[3:5])
    scale = q.shape[-1] ** 0.5  # it scales queries itself
    out, last = recurrent_rule(
        q * scale, k, v, *gates, initial_state=state[None].clone(), output_final_state=True
    )
    return out[0].transpose(0, 1), last[0]


def mamba_reference(rows: RecurrentRows, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same of Mamba-2, where each head is a group of its own."""
    c, b, x, _, steps = (each.transpose(0, 1)[None] for each in rows[:5])
    rates = (rows.log_decay / rows.beta)[:, 0]
    options = {"chunk_size": 16, "D": rows.skip, "return_final_states": True}
    initial = state.transpose(1, 2)[None]
    out, last = mamba2_chunk_scan(x, steps, rates, b, c, initial_states=initial, **options)
    return out[0].transpose(0, 1), last[0].transpose(1, 2)


def by_steps(rows: RecurrentRows, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, corrections and decays, token by token; the state advances."""
    outs, corrections, decays = [], [], []
    for token in range(rows.v.shape[1]):
        parts = (each[:, token : token + 1] for each in rows[:5])
        own = RecurrentRows(*parts, skip=rows.skip)
        decays.append(own.log_decay[:, 0].exp())
        out, d = step(own, decays[-1], state)
        outs.append(out)
        corrections.append(d)
    return torch.cat(outs, 1), torch.cat(corrections, 1), torch.stack(decays, 1)


@SHAPES
@pytest.mark.parametrize("tokens", [1, 2, 9, 64, 65, 200])
def test_all_forms_equal_the_recurrence(tokens: int, shape: RecurrentShape) -> None:
    rows, state = rows_of(tokens, shape), torch.randn(6, 12, 8)
    expected, last = reference(rows, state)
    stepped = state.clone()
    torch.testing.assert_close(by_steps(rows, stepped)[0], expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(stepped, last, atol=1e-5, rtol=1e-4)
    out, d = outputs_in_chunk(rows, state)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    decays = rows.log_decay.exp()
    for move in (advance, advance_by_steps):
        moved = state.clone()
        move(moved, rows.k, d, decays)
        torch.testing.assert_close(moved, last, atol=1e-5, rtol=1e-4)
    chunked = state.clone()
    torch.testing.assert_close(outputs_in_chunks(rows, chunked), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(chunked, last, atol=1e-5, rtol=1e-4)


@SHAPES
@pytest.mark.parametrize("dims", [(12, 8), (16, 16), (128, 128), (5, 7)])
def test_advancing_by_steps_repeats_every_bit(dims: tuple[int, int], shape: RecurrentShape) -> None:
    """Of all layers at once, and of one: so rejected tokens leave no trace."""
    shape = replace(shape, key_dim=dims[0], value_dim=dims[1])
    states = torch.randn(3, 6, *dims)
    stepped, kept = states.clone(), []
    for state in stepped:
        rows = rows_of(20, shape)
        _, d, decays = by_steps(rows, state)
        kept.append((rows.k, d, decays))
    together = states.clone()
    advance_by_steps(together, *(torch.stack(each) for each in zip(*kept, strict=True)))
    assert torch.equal(together, stepped)


@SHAPES
@pytest.mark.parametrize("decay", [0.0, 60.0, 1e4])
def test_extreme_decays(decay: float, shape: RecurrentShape) -> None:
    rows, state = rows_of(70, shape, decay), torch.randn(6, 12, 8)
    expected, last = reference(rows, state)
    moved = state.clone()
    torch.testing.assert_close(outputs_in_chunks(rows, moved), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(moved, last, atol=1e-5, rtol=1e-4)
    out, d = outputs_in_chunk(rows, state)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    advance(state, rows.k, d, rows.log_decay.exp())
    torch.testing.assert_close(state, last, atol=1e-5, rtol=1e-4)


def test_tiled_heads_are_the_same_in_another_order() -> None:
    tiled = RecurrentShape(frozenset({0}), 2, 6, 12, 8, 4, is_tiled=True)
    inputs, before = inputs_of(30), torch.randn(3, SHAPE.channels)
    order = torch.arange(6).view(2, 3).t().flatten()
    keys = 2 * 2 * 12
    channels = torch.cat(
        (torch.arange(keys), keys + (order[:, None] * 8 + torch.arange(8)).flatten())
    )
    other = RecurrentInputs(
        inputs.channels[:, channels],
        inputs.log_decay[:, order],
        inputs.beta[:, order],
        inputs.kernel[channels],
    )
    rows, expected = (
        recurrent_rows(tiled, other, before[:, channels]),
        recurrent_rows(SHAPE, inputs, before),
    )
    for own, theirs in zip(rows[:5], expected[:5], strict=True):
        assert torch.equal(own, theirs[order])


def fake_kernel(*args: Tensor, scale: float, initial_state: Tensor, **_: Any) -> tuple[Tensor, ...]:
    """The arguments and results of fla-core's `chunk_gated_delta_rule`."""
    q, k, v, log_decay, beta = (each[0].transpose(0, 1).float() for each in args)
    state = initial_state[0].clone()
    out = outputs_in_chunks(RecurrentRows(q * scale, k, v, log_decay, beta), state)
    return out.transpose(0, 1)[None].to(args[2].dtype), state[None]


def test_kernels_of_prompts_have_to_pass_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ModuleType("fla.ops.gated_delta_rule")
    monkeypatch.setattr(ops, "chunk_gated_delta_rule", fake_kernel, raising=False)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", ops)
    monkeypatch.delitem(sys.modules, "offload.recurrent.prompt_kernels", raising=False)
    kernels = import_module("offload.recurrent.prompt_kernels")
    monkeypatch.delitem(sys.modules, "offload.recurrent.prompt_kernels")
    device = torch.device("cpu")
    selection._test_prompts(kernels, device, torch.bfloat16, SHAPE)
    wrong = lambda *args, **options: fake_kernel(*args, **{**options, "scale": 1.1})  # noqa: E731
    monkeypatch.setattr(kernels, "chunk_gated_delta_rule", wrong)
    with pytest.raises(RuntimeError, match=r"outputs of the gated delta rule .* are wrong"):
        selection._test_prompts(kernels, device, torch.bfloat16, SHAPE)
    found, reason = selection.prompt_kernels("cpu", torch.bfloat16, SHAPE)
    assert (found, reason) == (None, "there are none for cpu")
