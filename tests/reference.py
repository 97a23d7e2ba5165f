"""What the fast paths are held against: attention in plain arithmetic, and a cache that is nothing but a list of tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from offload import Cache, KVLayout, Rotary


def reference_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """out (T, Hq, D) and lse (T, Hq), both float32: no kernel, one bool mask, the last T keys the queries' own if causal."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1).float(), v.repeat_interleave(groups, 1).float()
    scores = torch.einsum("thd,nhd->htn", q.float(), k) / math.sqrt(q.shape[2])
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("htn,nhd->thd", scores.softmax(-1), v), scores.logsumexp(-1).transpose(0, 1)


def random_rotary(layout: KVLayout, length: int, scale: float = 1.0) -> Rotary:
    """A table for `length` positions, with the usual frequencies."""
    exponents = torch.arange(0, layout.head_dim, 2) / layout.head_dim
    return Rotary(10_000.0**-exponents, scale, length, layout.dtype, torch.device("cpu"))


class PlainCache(Cache):
    """Keeps every layer's rotated KV as one growing tensor, and attends to all of it in plain arithmetic."""

    def __init__(self, layout: KVLayout, rotary: Rotary):
        super().__init__(layout)
        self.rotary = rotary
        self.kv = torch.empty(layout.layers, 2, 0, layout.heads, layout.head_dim, dtype=layout.dtype)  # (L, 2, N, Hkv, D)
        self._new: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        kv = torch.cat((self.kv[layer, :, :start], torch.stack((self.rotary(k, start), v))), dim=1)  # (2, N, Hkv, D)
        self._new = [*self._new[:layer], kv]
        return reference_attention(self.rotary(q, start), kv[0], kv[1], causal=True)[0].to(q.dtype)

    def advance(self, rows: int) -> None:
        super().advance(rows)
        if rows:
            self.kv = torch.stack(self._new)[:, :, : self.length]

    @property
    def device_bytes(self) -> int:
        return self.kv.nbytes
