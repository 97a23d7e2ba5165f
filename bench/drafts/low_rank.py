"""Keys of low rank on the device, and values fetched by choice: what slices are measured beside."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from offload.attention.head_major import put, span
from offload.cache.base import Cache
from offload.layout import ceil_div
from offload.tiered.cache import TieredCache

OUTLYING = 48  # chunks a head whose mean tells least of them, as published: kept on the device
# the published rank, 160 of 1,024 dimensions; and what half of the memory has room for
LOW_RANKS = {"low-rank keys, 5/32": 5 / 32, "low-rank keys, 3/4": 3 / 4}


class LowRankCache(Cache):
    """What ShadowKV drafts from: keys of low rank, a mean for every chunk, and outlying chunks.

    Each row chooses chunks of its own by these means, and attends to their keys of low rank and to
    their values, which would cross the link. Tokens behind the prompt are exact and always seen. It
    follows the target's cache, and holds all values here, so that nothing but the numbers differs.

    Source: ShadowKV (Sun et al. 2024, arXiv 2410.21465), algorithms 1 and 2.
    """

    def __init__(self, target: TieredCache, budget: int, chunk: int, rank: int):
        """Take `budget` tokens a head of a prompt's, in whole chunks; keys of this rank, over all
        heads of a layer.
        """
        super().__init__(target.layout)
        self.rotary, self.chunk, self.rank = target.rotary, chunk, rank
        self.chosen_chunks = ceil_div(budget, chunk)
        shape = target.layout.shape(target.layout.layers, target.shape.capacity)
        self._kv = torch.zeros(shape, dtype=target.layout.dtype)
        # by layer: means (H, C, D) of a prompt's chunks, and which of them outlie (H, n)
        self._means: dict[int, Tensor] = {}
        self._outlying: dict[int, Tensor] = {}

    @property
    def device_bytes(self) -> int:
        return self._kv.nbytes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        kv, end = self._kv[layer], start + len(q)
        put(kv, self.rotary(k, start, layer), v, start)
        q = self.rotary(q, start, layer)
        rows, heads, dim = q.shape
        # (Hkv, G, T, D)
        by_group = q.view(rows, self.layout.heads, -1, dim).permute(1, 2, 0, 3)
        keys, values = span(kv, 0, end)[:, :, None].expand(-1, -1, by_group.shape[1], -1, -1)
        seen = self._seen(layer, by_group, start, end)[:, None]
        out = F.scaled_dot_product_attention(by_group, keys, values, attn_mask=seen)
        return out.permute(2, 0, 1, 3).reshape(rows, heads, dim)

    def _seen(self, layer: int, q: Tensor, start: int, end: int) -> Tensor:
        """Return which of `end` tokens the rows of q (Hkv, G, T, D) attend to, (Hkv, T, end)."""
        means, outlying = self._means[layer], self._outlying[layer]
        scores = torch.einsum("hgtd,hcd->hgtc", q, means) / math.sqrt(q.shape[-1])
        shares = scores.softmax(-1).amax(1)  # (Hkv, T, C)
        rows = q.shape[2]
        shares.scatter_(2, outlying[:, None].expand(-1, rows, -1), torch.inf)
        count = min(self.chosen_chunks + outlying.shape[1], means.shape[1])
        best = shares.topk(count, dim=-1).indices
        chosen = torch.zeros_like(shares, dtype=torch.bool).scatter_(2, best, True)
        causal = torch.arange(end) <= torch.arange(start, end)[:, None]
        seen = causal.repeat(len(means), 1, 1)
        span_of_means = means.shape[1] * self.chunk
        seen[..., :span_of_means] &= chosen.repeat_interleave(self.chunk, dim=-1)
        return seen

    # -- following the target ----------------------------------------------------------------------

    def follow(self, boundary: int, length: int, end: int) -> None:
        pass

    def observe(self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor) -> None:
        if head or prefix.shape[1] != self.layout.heads:
            raise ValueError("a layer is seen whole, for its rank is that of all heads")
        kv, boundary = self._kv[layer], prefix.shape[2]
        if layer not in self._means:
            self._read_prompt(layer, prefix)
        span(kv, boundary, boundary + recent.shape[2]).copy_(recent)

    def advanced(self, length: int) -> None:
        self.length = length

    def _read_prompt(self, layer: int, prefix: Tensor) -> None:
        """Keep a prompt's keys and values (2, H, N, D): once, for what follows stays exact."""
        keys, values = prefix
        heads, tokens, _ = keys.shape
        chunks = keys[:, : tokens - tokens % self.chunk].unflatten(1, (-1, self.chunk))
        means = chunks.mean(2)  # (H, C, D)
        likeness = F.cosine_similarity(chunks, means[:, :, None], dim=-1).amin(2)  # (H, C)
        outlying = likeness.topk(min(OUTLYING, means.shape[1]), largest=False).indices
        self._means[layer], self._outlying[layer] = means, outlying
        exact = torch.zeros(heads, tokens, dtype=torch.bool)
        in_chunks = torch.zeros(heads, means.shape[1], dtype=torch.bool).scatter_(1, outlying, True)
        exact[:, : chunks.shape[1] * self.chunk] = in_chunks.repeat_interleave(self.chunk, dim=1)
        exact[:, chunks.shape[1] * self.chunk :] = True  # less than a chunk is left
        kept = torch.where(exact[..., None], keys, self._of_low_rank(layer, keys))
        span(self._kv[layer], 0, tokens).copy_(torch.stack([kept, values]))

    def _of_low_rank(self, layer: int, keys: Tensor) -> Tensor:
        """Return rotated keys (H, N, D) of which, before rotation, only the rank is kept."""
        heads, tokens, dim = keys.shape
        cos, sin = self.rotary.at(torch.arange(tokens))
        scale = 1 if layer in self.rotary.unrotated else float(cos[0, 0, 0]) ** 2
        # turned back: the other way round, less what scaling did twice
        plain = self.rotary.turn(keys.transpose(0, 1), (cos, -sin), layer) / scale
        flat = plain.reshape(tokens, heads * dim).double()
        # the best of this rank: onto the eigenvectors of its Gram matrix
        _, vectors = torch.linalg.eigh(flat.T @ flat)
        basis = vectors[:, -self.rank :]
        low = (flat @ basis @ basis.T).to(keys.dtype).view(tokens, heads, dim)
        return self.rotary.turn(low, (cos, sin), layer).transpose(0, 1)
