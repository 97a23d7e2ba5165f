"""What the fast paths are held against: attention in plain arithmetic, a cache that is nothing but
a list of tokens, and a retrieval cache that goes head by head and chunk by chunk.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from offload.cache.base import Cache
from offload.layout import KVLayout
from offload.retrieval.policy_specs import POLICY_SPECS
from offload.retrieval.selection import SCORE_DECAY
from offload.retrieval.shape import RetrievalCacheSpec
from offload.rotary import Rotary

Kept = tuple[Tensor, Tensor]  # keys and values (n, D) that one head keeps


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out (T, Hq, D) and lse (T, Hq), both float32: no kernel, one bool mask, the last T keys the
    queries' own if causal.

    mask (T, N) is added to the scores.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1).float(), v.repeat_interleave(groups, 1).float()
    scores = torch.einsum("thd,nhd->htn", q.float(), k) / math.sqrt(q.shape[2])
    if mask is not None:
        scores = scores + mask
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(
            len(k) - len(q) + 1
        )
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("htn,nhd->thd", scores.softmax(-1), v), scores.logsumexp(-1).transpose(0, 1)


def random_rotary(layout: KVLayout, length: int, scale: float = 1.0) -> Rotary:
    """A table for `length` positions, with the usual frequencies. The second layer has no RoPE."""
    exponents = torch.arange(0, layout.head_dim, 2) / layout.head_dim
    return Rotary(10_000.0**-exponents, scale, length, layout.dtype, torch.device("cpu"), {1})


class PlainCache(Cache):
    """Keeps every layer's rotated KV as one growing tensor, and attends to all of it in plain
    arithmetic.
    """

    def __init__(self, layout: KVLayout, rotary: Rotary):
        super().__init__(layout)
        self.rotary = rotary
        # (L, 2, N, Hkv, D)
        self.kv = torch.empty(
            layout.layers, 2, 0, layout.heads, layout.head_dim, dtype=layout.dtype
        )
        self._new: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        new = torch.stack((self.rotary(k, start, layer), v))
        kv = torch.cat((self.kv[layer, :, :start], new), dim=1)  # (2, N, Hkv, D)
        self._new = [*self._new[:layer], kv]
        q = self.rotary(q, start, layer)
        return reference_attention(q, kv[0], kv[1], causal=True)[0].to(q.dtype)

    def advance(self, rows: int) -> None:
        super().advance(rows)
        if rows:
            self.kv = torch.stack(self._new)[:, :, : self.length]

    @property
    def device_bytes(self) -> int:
        return self.kv.nbytes


def worths_by_hand(
    policy: str, queries: Tensor, keys: Tensor, recent: list[Tensor], chunk: int
) -> Tensor:
    """The worth (C,) of every chunk of keys (N, D), N a multiple of chunk, to queries (R, G, D) of
    R rows and to them alone. recent (M, D): the keys behind the others that each row sees.
    """
    queries = queries * keys.shape[1] ** -0.5
    if policy == "static":
        means = torch.stack([part.mean(0) for part in keys.split(chunk)])
        return sum((means @ query).softmax(0) for query in queries[-1])
    given = [
        [(torch.cat((keys, own)) @ query).softmax(0)[: len(keys)] for query in row]
        for row, own in zip(queries, recent, strict=True)
    ]
    most = [torch.stack(rows).amax(0) for rows in zip(*given, strict=True)]  # by query head
    return torch.stack([part.sum() for part in (sum(most) / len(most)).split(chunk)])


def chosen_by_hand(worths: Tensor, chunk: int, count: int) -> list[int]:
    """Tokens of the first chunk and of the `count` - 1 best others."""
    others = [index for index in worths.argsort(descending=True).tolist() if index]
    return [
        index * chunk + offset
        for index in sorted([0, *others[: count - 1]])
        for offset in range(chunk)
    ]


def in_8_bits(x: Tensor) -> Tensor:
    """Keys or values (N, D), token by token as 127 steps up to the largest magnitude."""
    tokens = []
    for token in x:
        step = (token.abs().max().float() / 127).to(x.dtype)
        tokens.append((token.float() / step.float()).round().to(x.dtype) * step)
    return torch.stack(tokens)


class RetrievalByHand:
    """What a retrieval cache should give, from queries, keys and values of the whole text: brute
    force, head by head.

    A text is [(q, k, v)] by layer, none of them rotated, from position 0 on.
    """

    def __init__(self, shape: RetrievalCacheSpec, policy: str, rotary: Rotary):
        self.shape, self.policy, self.rotary = shape, policy, rotary
        self.base = 0  # every token from here on is kept
        self._kept: dict[tuple[int, int], Kept] = {}  # by layer and KV head
        self._worths: dict[tuple[int, int], Tensor] = {}

    def choose(self, text: list[tuple[Tensor, Tensor, Tensor]], rows: int, boundary: int) -> None:
        """The last `rows` tokens of the text are a pass of the target, whose prefix has `boundary`
        tokens.
        """
        rows = min(rows, len(text[0][0]) - boundary)  # those of the prefix have no say
        self.base, count = boundary, min(POLICY_SPECS[self.policy].query_rows, rows)
        seen = [len(text[0][0]) - rows + rows * (index + 1) // count - 1 for index in range(count)]
        for layer, (q, k, v) in enumerate(text):
            q, k = self.rotary(q, 0, layer)[seen], self.rotary(k, 0, layer)
            groups = q.shape[1] // k.shape[1]
            for head in range(k.shape[1]):
                queries = q[:, head * groups : (head + 1) * groups]
                recent = [k[boundary : row + 1, head] for row in seen]
                prefix = k[:boundary, head], v[:boundary, head]
                self._kept[layer, head] = self._keep((layer, head), queries, prefix, recent, len(k))

    def attend(self, text: list[tuple[Tensor, Tensor, Tensor]], rows: int) -> Tensor:
        """Attention of the last `rows` tokens: (L, T, Hq, D)."""
        layers = []
        for layer, (q, k, v) in enumerate(text):
            q, k, heads = self.rotary(q, 0, layer)[-rows:], self.rotary(k, 0, layer), []
            groups = q.shape[1] // k.shape[1]
            for head in range(k.shape[1]):
                keys, values = (
                    torch.cat((kept, new[self.base :, head]))
                    for kept, new in zip(self._kept[layer, head], (k, v), strict=True)
                )
                mine = q[:, head * groups : (head + 1) * groups]
                heads.append(reference_attention(mine, keys[:, None], values[:, None], True)[0])
            layers.append(torch.cat(heads, dim=1))
        return torch.stack(layers)

    def _keep(
        self, place: tuple[int, int], queries: Tensor, prefix: Kept, recent: list[Tensor], end: int
    ) -> Kept:
        keys, values = prefix
        if not len(keys):
            return prefix
        if end <= self.shape.budget:
            return self._held(keys, values)
        chunk = self.shape.chunk
        worths = worths_by_hand(self.policy, queries, keys, recent, chunk)
        if self.policy == "attention":
            before = self._worths.get(place, torch.zeros(0))
            worths[: len(before)] += SCORE_DECAY * before
            self._worths[place] = worths
        count = max(1, (self.shape.budget - (end - len(keys))) // chunk)
        chosen = chosen_by_hand(worths, chunk, count)
        return self._held(keys[chosen], values[chosen])

    def _held(self, keys: Tensor, values: Tensor) -> Kept:
        """What the cache holds of selected tokens."""
        if not self.shape.quantised:
            return keys, values
        return in_8_bits(keys), in_8_bits(values)
