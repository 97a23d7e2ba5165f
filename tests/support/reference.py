"""References for the optimised paths.

Attention in plain arithmetic, a cache that is a list of tokens, and a retrieval cache computed head
by head and chunk by chunk.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from offload.attention.folding import Partial
from offload.cache.base import Cache
from offload.layout import KVLayout
from offload.retrieval.policy_specs import POLICY_SPECS
from offload.retrieval.selection import SCORE_DECAY
from offload.retrieval.shape import RetrievalCacheSpec
from offload.rotary import Rotary

HeadKV = tuple[Tensor, Tensor]  # selected keys and values (n, D) of one head


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return out (T, Hq, D) and lse (T, Hq), both float32, without a kernel.

    If causal, the last T keys are the queries' own. mask (T, N) is added to the scores.
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


def window_mask(rows: int, keys: int, window: int | None) -> Tensor | None:
    """Return the mask (rows, keys) of the last rows that hides keys before a window."""
    if window is None:
        return None
    distance = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
    return torch.zeros(rows, keys).masked_fill(distance >= window, -torch.inf)


def random_rotary(layout: KVLayout, length: int, scale: float = 1.0) -> Rotary:
    """Return RoPE tables of `length` positions, with the usual frequencies.

    The second layer has no RoPE.
    """
    frequencies = [
        10_000.0 ** -(torch.arange(0, dim, 2) / dim)
        for dim in (layout.head_dim, layout.windowed.head_dim)
    ]
    rotary = Rotary(frequencies[0], scale, length, layout.dtype, torch.device("cpu"), {1})
    if layout.window is not None and layout.windowed_heads is not None:
        rotary.rotate_windowed(frequencies[1], scale, layout.window.layers)
    return rotary


class PlainCache(Cache):
    """Attends in plain arithmetic, with each layer's rotated KV in one growing tensor."""

    def __init__(self, layout: KVLayout, rotary: Rotary):
        super().__init__(layout)
        self.rotary = rotary
        layouts = map(layout.of, range(layout.layers))
        # (2, N, Hkv, D) of each layer
        self._kept = [
            torch.empty(2, 0, each.heads, each.head_dim, dtype=layout.dtype) for each in layouts
        ]
        self._new: list[Tensor] = []

    @property
    def kv(self) -> Tensor:
        """Return the KV (L, 2, N, Hkv, D) of layers with the same heads."""
        return torch.stack(self._kept)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Partial:
        new_kv = torch.stack((self.rotary.keys(k, start, layer), v))
        kv = torch.cat((self._kept[layer][:, :start], new_kv), dim=1)  # (2, N, Hkv, D)
        self._new = [*self._new[:layer], kv]
        q = self.rotary.queries(q, start, layer)
        mask = window_mask(len(q), kv.shape[1], self.layout.window_of(layer))
        out, lse = reference_attention(q, kv[0], kv[1], causal=True, mask=mask)
        return out.to(q.dtype), lse

    def advance(self, rows: int) -> None:
        super().advance(rows)
        if rows:
            self._kept = [kv[:, : self.length] for kv in self._new]

    @property
    def device_bytes(self) -> int:
        return sum(kv.nbytes for kv in self._kept)


def reference_scores(
    policy: str, queries: Tensor, keys: Tensor, recent: list[Tensor], chunk: int
) -> Tensor:
    """Return the scores (C,) of the chunks of keys (N, D), N a multiple of chunk.

    They are for queries (R, G, D) of R query tokens alone, without earlier scores. recent (M, D)
    are the keys after the others that each query token attends to.
    """
    queries = queries * keys.shape[1] ** -0.5
    if policy == "static":
        means = torch.stack([part.mean(0) for part in keys.split(chunk)])
        return sum((means @ query).softmax(0) for query in queries[-1])
    weights = [
        [(torch.cat((keys, own_keys)) @ query).softmax(0)[: len(keys)] for query in row]
        for row, own_keys in zip(queries, recent, strict=True)
    ]
    head_weights = [torch.stack(rows).amax(0) for rows in zip(*weights, strict=True)]
    mean = sum(head_weights) / len(head_weights)
    return torch.stack([part.sum() for part in mean.split(chunk)])


def reference_selection(scores: Tensor, chunk: int, count: int) -> list[int]:
    """Return the tokens of the first chunk and of the `count` - 1 highest-scoring others."""
    others = [index for index in scores.argsort(descending=True).tolist() if index]
    return [
        index * chunk + offset
        for index in sorted([0, *others[: count - 1]])
        for offset in range(chunk)
    ]


def quantise_int8(x: Tensor) -> Tensor:
    """Quantise keys or values (N, D) per token, with 127 steps up to the largest magnitude."""
    tokens = []
    for token in x:
        step = (token.abs().max().float() / 127).to(x.dtype)
        tokens.append((token.float() / step.float()).round().to(x.dtype) * step)
    return torch.stack(tokens)


class ReferenceRetrieval:
    """What a retrieval cache should attend to, by brute force, head by head.

    Its input is the whole sequence, [(q, k, v)] by layer, none of them rotated, from position 0 on.
    """

    def __init__(self, shape: RetrievalCacheSpec, policy: str, rotary: Rotary):
        self.shape, self.policy, self.rotary = shape, policy, rotary
        self.base = 0  # every token from here on is in the cache
        self._selected: dict[tuple[int, int], HeadKV] = {}  # (layer, KV head) -> selected tokens
        self._scores: dict[tuple[int, int], Tensor] = {}

    def select(
        self, sequence: list[tuple[Tensor, Tensor, Tensor]], rows: int, boundary: int
    ) -> None:
        """Select as after a forward of the target.

        Its query tokens are the last `rows` of the sequence, its prefix has `boundary` tokens.
        """
        rows = min(rows, len(sequence[0][0]) - boundary)  # query tokens of the prefix do not count
        count = min(POLICY_SPECS[self.policy].query_rows, rows)
        self.base = boundary
        start = len(sequence[0][0]) - rows
        seen = [start + rows * (index + 1) // count - 1 for index in range(count)]
        for layer, (q, k, v) in enumerate(sequence):
            q, k = self.rotary.queries(q, 0, layer)[seen], self.rotary.keys(k, 0, layer)
            groups = q.shape[1] // k.shape[1]
            for head in range(k.shape[1]):
                queries = q[:, head * groups : (head + 1) * groups]
                recent = [k[boundary : row + 1, head] for row in seen]
                prefix = k[:boundary, head], v[:boundary, head]
                self._selected[layer, head] = self._select_head(
                    (layer, head), queries, prefix, recent, len(k)
                )

    def attend(self, sequence: list[tuple[Tensor, Tensor, Tensor]], rows: int) -> Tensor:
        """Return the attention of the last `rows` tokens, (L, T, Hq, D)."""
        layers = []
        for layer, (q, k, v) in enumerate(sequence):
            q, k = self.rotary.queries(q, 0, layer)[-rows:], self.rotary.keys(k, 0, layer)
            heads = []
            groups = q.shape[1] // k.shape[1]
            for head in range(k.shape[1]):
                keys, values = (
                    torch.cat((selected, new_kv[self.base :, head]))
                    for selected, new_kv in zip(self._selected[layer, head], (k, v), strict=True)
                )
                head_queries = q[:, head * groups : (head + 1) * groups]
                heads.append(
                    reference_attention(head_queries, keys[:, None], values[:, None], True)[0]
                )
            layers.append(torch.cat(heads, dim=1))
        return torch.stack(layers)

    def _select_head(
        self, key: tuple[int, int], queries: Tensor, prefix: HeadKV, recent: list[Tensor], end: int
    ) -> HeadKV:
        keys, values = prefix
        if not len(keys):
            return prefix
        if end <= self.shape.budget:
            return self._stored(keys, values)
        chunk = self.shape.chunk
        scores = reference_scores(self.policy, queries, keys, recent, chunk)
        if self.policy == "attention":
            previous = self._scores.get(key, torch.zeros(0))
            scores[: len(previous)] += SCORE_DECAY * previous
            self._scores[key] = scores
        count = max(1, (self.shape.budget - (end - len(keys))) // chunk)
        positions = reference_selection(scores, chunk, count)
        return self._stored(keys[positions], values[positions])

    def _stored(self, keys: Tensor, values: Tensor) -> HeadKV:
        """Return selected tokens as the cache stores them."""
        if not self.shape.quantised:
            return keys, values
        return quantise_int8(keys), quantise_int8(values)
