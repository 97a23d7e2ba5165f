"""Linear recurrences over tokens, in chunks or token by token: the gated delta rule, and Mamba-2.

A head's state S (Dk, Dv) maps keys to values. A token t first lets all decay, then adds to the
value of its key:

    S_t = f_t S_(t-1) + k_t d_t^T

and reads S_t^T q_t. The gated delta rule corrects the value, d_t = b_t (v_t - (f_t S_(t-1))^T k_t),
and what it reads is its output. Mamba-2 (state space duality) only adds, d_t = b_t v_t, and to what
it reads it adds the value times a number of the head, D; in its terms q, k, v and b are C, B, x and
the step size. The pairs (k, d) with the decays f are all that changes a state: with them it
advances past tokens whose outputs were computed before, without weights.

Source: Yang et al. 2025, Gated Delta Networks, arXiv 2412.06464, section 3; the form in chunks is
that of section 3.3, with the inverse applied by forward substitution. Dao and Gu 2024, Transformers
are SSMs, arXiv 2405.21060, section 6.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from offload.layout import STATE_CHUNK, RecurrentShape

_EPS = 1e-6  # added to the squared length of a query or key (transformers, modeling_qwen3_next.py)


class RecurrentInputs(NamedTuple):
    """What a layer's recurrence needs of its tokens."""

    channels: Tensor  # (T, C), queries, keys and values of all heads before the convolution
    log_decay: Tensor  # (T, Hv) float32, at most 0
    beta: Tensor  # (T, Hv) float32, the strength of the correction, or the step size
    kernel: Tensor  # (C, K), the convolution's weights: the layer's own
    bias: Tensor | None = None  # (C,), the convolution's, in Mamba-2
    skip: Tensor | None = None  # (Hv,) float32, by which Mamba-2 adds values to outputs

    def rows(self, rows: slice) -> RecurrentInputs:
        """Return those of some of the tokens."""
        channels, log_decay, beta = (each[rows] for each in self[:3])
        return self._replace(channels=channels, log_decay=log_decay, beta=beta)


class RecurrentRows(NamedTuple):
    """Tokens as the recurrence sees them, in float32."""

    q: Tensor  # (Hv, T, Dk), in the delta rule normalised and scaled
    k: Tensor  # (Hv, T, Dk), in the delta rule normalised
    v: Tensor  # (Hv, T, Dv)
    log_decay: Tensor  # (Hv, T)
    beta: Tensor  # (Hv, T)
    skip: Tensor | None = None  # (Hv,), in Mamba-2, whose values are not corrected


def recurrent_rows(shape: RecurrentShape, inputs: RecurrentInputs, before: Tensor) -> RecurrentRows:
    """Return the rows of T tokens; `before` (K - 1, C) are the channels of those before them."""
    padded = torch.cat((before, inputs.channels)).float()
    count, kernel = len(inputs.channels), inputs.kernel.float()
    # sums in a fixed order: a token's does not depend on how many tokens there are
    mixed = padded[:count] * kernel[:, 0]
    for place in range(1, shape.kernel_size):
        mixed.addcmul_(padded[place : place + count], kernel[:, place])
    if inputs.bias is not None:
        mixed += inputs.bias.float()
    # rounded where the model's own convolution and activation round
    mixed = F.silu(mixed.to(before.dtype)).float()
    keys = shape.key_heads * shape.key_dim
    parts = mixed.split([keys, keys, shape.value_heads * shape.value_dim], dim=-1)
    q, k = (part.unflatten(-1, (-1, shape.key_dim)) for part in parts[:2])
    if not shape.is_mamba:
        q, k = _unit(q) * shape.key_dim**-0.5, _unit(k)
    v = parts[2].unflatten(-1, (-1, shape.value_dim))
    q, k = (for_value_heads(shape, x.transpose(0, 1)) for x in (q, k))
    decay, beta = inputs.log_decay.t(), inputs.beta.t()
    return RecurrentRows(q, k, v.transpose(0, 1), decay, beta, inputs.skip)


def for_value_heads(shape: RecurrentShape, x: Tensor) -> Tensor:
    """Return x (..., Hv, T, D), given that of the key heads (..., Hk, T, D)."""
    if shape.is_tiled:
        return torch.cat([x] * shape.shared, dim=-3)
    return x.repeat_interleave(shape.shared, dim=-3)


def for_key_heads(shape: RecurrentShape, x: Tensor) -> Tensor:
    """Return x (Hk, T, D), given the equal ones of value heads (Hv, T, D)."""
    return x[: shape.key_heads] if shape.is_tiled else x[:: shape.shared]


def outputs_in_chunk(rows: RecurrentRows, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs (Hv, T, Dv) of a few tokens after a state (Hv, Dk, Dv), and their d.

    The state stays as it is.
    """
    q, k, v, log_decay, beta, skip = rows
    total = log_decay.cumsum(-1)  # (Hv, T)
    between = _decays_between(total)  # (Hv, T, T)
    decay, strength = total.exp()[..., None], beta[..., None]
    d = strength * (v if skip is not None else v - decay * (k @ state))
    if skip is None:
        system = (k * strength) @ k.transpose(1, 2) * between
        d = torch.linalg.solve_triangular(system, d, upper=False, unitriangular=True)
    scores = (q @ k.transpose(1, 2) * between).tril_()  # NaN of later tokens is dropped
    return _with_skip(rows, decay * (q @ state) + scores @ d), d


def outputs_in_chunks(rows: RecurrentRows, state: Tensor) -> Tensor:
    """Return the outputs (Hv, T, Dv) of many tokens; the state (Hv, Dk, Dv) advances past them.

    The chunks have STATE_CHUNK tokens, the last one what is left.
    """
    q, k, v, log_decay, beta = (_chunked(each) for each in rows[:5])  # (Hv, N, n, ...)
    total = log_decay.cumsum(-1)
    between = _decays_between(total)
    decay, strength = total.exp()[..., None], beta[..., None]
    # d = u - w S: both solved for all chunks at once, then S chunk by chunk; in Mamba-2 only u
    u, w = strength * v, None
    if rows.skip is None:
        system = (k * strength) @ k.transpose(-1, -2) * between
        both = torch.cat((u, strength * decay * k), dim=-1)
        solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = q @ k.transpose(-1, -2) * between
    # keys as much decayed as what they add is at the chunk's end
    left = k * (total[..., -1:] - total).exp()[..., None]
    outs = torch.empty_like(v)
    for index in range(v.shape[1]):
        d = u[:, index] if w is None else u[:, index] - w[:, index] @ state
        outs[:, index] = decay[:, index] * (q[:, index] @ state) + scores[:, index] @ d
        state.mul_(decay[:, index, -1:]).baddbmm_(left[:, index].transpose(1, 2), d)
    return _with_skip(rows, outs.flatten(1, 2)[:, : rows.v.shape[1]])


def step(rows: RecurrentRows, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output (Hv, 1, Dv) of one token, and its d; the state advances past it.

    decay (Hv,) is its f.
    """
    state.mul_(decay[:, None, None])
    wanted = rows.v if rows.skip is not None else rows.v - rows.k @ state
    d = rows.beta[..., None] * wanted
    _add_products(state, rows.k[:, 0], d[:, 0])
    return _with_skip(rows, rows.q @ state), d


def advance(state: Tensor, k: Tensor, d: Tensor, decays: Tensor) -> None:
    """Advance states (..., Dk, Dv) past T tokens, one or more.

    k (..., T, Dk), d (..., T, Dv) and the decays f (..., T) are theirs.
    """
    from_each = decays.flip(-1).cumprod(-1).flip(-1)  # products from a token to the last
    left = torch.cat((from_each[..., 1:], torch.ones_like(from_each[..., :1])), dim=-1)
    state.mul_(from_each[..., :1, None])
    added = (k * left[..., None]).transpose(-1, -2).flatten(0, -3)
    state.view(-1, *state.shape[-2:]).baddbmm_(added, d.flatten(0, -3))


def advance_by_steps(state: Tensor, k: Tensor, d: Tensor, decays: Tensor) -> None:
    """Advance as `advance`, token by token: to the very bits that `step` leaves."""
    for token in range(k.shape[-2]):
        state.mul_(decays[..., token, None, None])
        _add_products(state, k[..., token, :], d[..., token, :])


def _with_skip(rows: RecurrentRows, out: Tensor) -> Tensor:
    """Return outputs (Hv, T, Dv) with their part of the values, if there is one."""
    return out if rows.skip is None else out + rows.skip[:, None, None] * rows.v


def _add_products(state: Tensor, k: Tensor, d: Tensor) -> None:
    """Add k d^T to states (..., Dk, Dv): rounded products, then rounded sums, of any shape."""
    state.add_(k[..., :, None] * d[..., None, :])


def _decays_between(total: Tensor) -> Tensor:
    """Return the decay (..., T, T) from each token to each later one, from their sums (..., T)."""
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device)
    between = total[..., :, None] - total[..., None, :]
    return between.masked_fill_(later.triu_(1), -torch.inf).exp_()


def _unit(x: Tensor) -> Tensor:
    """Return x (..., D) divided by its length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _chunked(x: Tensor) -> Tensor:
    """Return x (Hv, T, ...) as whole chunks (Hv, N, n, ...); tokens are padded by zeros."""
    rest = -x.shape[1] % STATE_CHUNK
    padded = F.pad(x, [0, 0] * (x.dim() - 2) + [0, rest]) if rest else x
    return padded.unflatten(1, (-1, STATE_CHUNK))
