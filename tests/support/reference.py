"""What the fast paths are held against: attention in plain arithmetic, a cache that is nothing but
a list of tokens, and a retrieval cache that goes head by head and chunk by chunk.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from offload.cache import Cache
from offload.layout import KVLayout
from offload.policies import POLICY_TRAITS
from offload.retrieval_shape import RetrievalShape
from offload.rotary import Rotary

Kept = tuple[Tensor, Tensor, Tensor]  # keys, values (n, D) and bias (n,) that one head keeps


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out (T, Hq, D) and lse (T, Hq), both float32: no kernel, one bool mask, the last T keys the
    queries' own if causal.

    bias (Hkv, N) is added to the scores.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1).float(), v.repeat_interleave(groups, 1).float()
    scores = torch.einsum("thd,nhd->htn", q.float(), k) / math.sqrt(q.shape[2])
    if bias is not None:
        scores = scores + bias.repeat_interleave(groups, 0)[:, None]
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


def worths_by_hand(policy: str, queries: Tensor, keys: Tensor, chunk: int) -> Tensor:
    """The worth (C,) of every chunk of keys (N, D), N a multiple of chunk, to queries (R, D) and to
    them alone.
    """
    chunks, scale = keys.split(chunk), keys.shape[1] ** -0.5
    if policy == "window":
        return torch.arange(len(chunks)).float()
    if policy in ("static", "mean-key"):
        means = torch.stack([part.mean(0) for part in chunks])
        return sum((means @ query * scale).softmax(0) for query in queries)
    shares = sum((keys @ query * scale).softmax(0) for query in queries)
    own = [part.sum() for part in shares.split(chunk)]
    if policy == "accumulated":
        return torch.stack(own)
    return torch.stack(
        [
            max(worth, before / 2)
            for worth, before in zip(own, [torch.zeros(()), *own[:-1]], strict=True)
        ]
    )


def chosen_by_hand(worths: Tensor, chunk: int, count: int) -> list[int]:
    """Tokens of the first chunk and of the `count` - 1 best others."""
    others = [index for index in worths.argsort(descending=True).tolist() if index]
    return [
        index * chunk + offset
        for index in sorted([0, *others[: count - 1]])
        for offset in range(chunk)
    ]


def tangent_by_hand(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """k' and v' (D,), as `tangents` states them, of keys and values (n, D) that are all
    summarised.
    """
    weights = sum((keys @ query * keys.shape[1] ** -0.5).softmax(0) for query in queries) / len(
        queries
    )
    return weights @ keys, weights @ values


def bias_by_hand(queries: Tensor, keys: Tensor, key: Tensor) -> Tensor:
    """b, as `biases` states it, of a summary with this key (D,) that stands for keys (n, D)."""
    masses = [
        (keys @ query * keys.shape[1] ** -0.5).logsumexp(0) - key @ query * keys.shape[1] ** -0.5
        for query in queries
    ]
    return torch.stack(masses).mean()


class RetrievalByHand:
    """What a retrieval cache should give, from queries, keys and values of the whole text: brute
    force, head by head.

    A text is [(q, k, v)] by layer, none of them rotated, from position 0 on.
    """

    def __init__(self, shape: RetrievalShape, policy: str, rotary: Rotary, summary_shares: int = 1):
        self.shape, self.policy, self.rotary = shape, policy, rotary
        self.summary_shares = summary_shares
        self.base = 0  # every token from here on is kept
        self._choices = 0
        # summaries of whole stretches
        self._made: dict[tuple[int, int], dict[int, tuple[Tensor, Tensor]]] = {}
        self._kept: dict[tuple[int, int], Kept] = {}  # by layer and KV head
        self._sums: dict[tuple[int, int], Tensor] = {}

    def choose(self, text: list[tuple[Tensor, Tensor, Tensor]], rows: int, boundary: int) -> None:
        """The last `rows` tokens of the text are a pass of the target, whose prefix has `boundary`
        tokens.
        """
        self.base, count = boundary, min(POLICY_TRAITS[self.policy].rows, rows)
        seen = [len(text[0][0]) - rows + rows * (index + 1) // count - 1 for index in range(count)]
        for layer, (q, k, v) in enumerate(text):
            q, k = self.rotary(q, 0, layer)[seen], self.rotary(k, 0, layer)
            groups = q.shape[1] // k.shape[1]
            for head in range(k.shape[1]):
                queries = q[:, head * groups : (head + 1) * groups].flatten(0, 1)
                kept = self._keep(
                    layer, head, queries, k[:boundary, head], v[:boundary, head], len(k)
                )
                self._kept[layer, head] = kept
        self._choices += 1

    def attend(self, text: list[tuple[Tensor, Tensor, Tensor]], rows: int) -> Tensor:
        """Attention of the last `rows` tokens: (L, T, Hq, D)."""
        layers = []
        for layer, (q, k, v) in enumerate(text):
            q, k, heads = self.rotary(q, 0, layer)[-rows:], self.rotary(k, 0, layer), []
            groups = q.shape[1] // k.shape[1]
            for head in range(k.shape[1]):
                keys, values, bias = self._kept[layer, head]
                keys, values = (
                    torch.cat((a, b[self.base :, head])) for a, b in ((keys, k), (values, v))
                )
                bias = torch.cat((bias, torch.zeros(len(keys) - len(bias))))
                mine = q[:, head * groups : (head + 1) * groups]
                heads.append(
                    reference_attention(mine, keys[:, None], values[:, None], True, bias[None])[0]
                )
            layers.append(torch.cat(heads, dim=1))
        return torch.stack(layers)

    def _keep(
        self, layer: int, head: int, queries: Tensor, keys: Tensor, values: Tensor, tokens: int
    ) -> Kept:
        if tokens <= self.shape.budget or not len(keys):
            return keys, values, torch.zeros(len(keys))
        chunk, size = self.shape.chunk, self.shape.summary
        worths = worths_by_hand(self.policy, queries, keys, chunk)
        if self.policy == "accumulated":
            before = self._sums.get((layer, head), torch.zeros(0))
            worths = torch.cat((worths[: len(before)] + before, worths[len(before) :]))
            self._sums[layer, head] = worths
        summaries = math.ceil(len(keys) / size) if size else 0
        count = max(1, (self.shape.budget - summaries - (tokens - len(keys))) // chunk)
        chosen = chosen_by_hand(worths, chunk, count)
        kept = [(keys[token], values[token], torch.zeros(())) for token in chosen]
        old, new = self._made.get((layer, head), {}), {}
        share = [
            len(old) * (self._choices % self.summary_shares + more) // self.summary_shares
            for more in (0, 1)
        ]
        for index in range(summaries):
            stretch = range(index * size, min((index + 1) * size, len(keys)))
            rest = [token for token in stretch if token not in chosen]
            if index in old and not share[0] <= index < share[1]:
                key, value = old[index]
            elif rest:
                key, value = tangent_by_hand(queries, keys[rest], values[rest])
            else:
                key, value = keys[stretch].mean(0), values[stretch].mean(0)
            if rest:
                kept.append((key, value, bias_by_hand(queries, keys[rest], key)))
            if len(stretch) == size:
                new[index] = key, value
        self._made[layer, head] = new
        return tuple(torch.stack(parts) for parts in zip(*kept, strict=True))
