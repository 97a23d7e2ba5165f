"""Policies that select which chunks of the context a retrieval cache keeps.

A policy is given the target's queries at a verification, and all its keys while they are on the
device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from offload.attention.shape_buckets import has_native_bf16
from offload.kernels.selection import retrieval_kernels
from offload.retrieval.policy_specs import POLICY_SPECS, PolicySpec
from offload.retrieval.shape import OBSERVED_KEYS, RetrievalCacheSpec

# Weight of earlier scores at the next selection.
SCORE_DECAY = 0.9


class QuerySample:
    """Sampled query tokens of a forward, and the keys of a few KV heads: prefix and recent.

    Derived tensors are computed once, when first used.
    """

    def __init__(self, q: Tensor, keys: Tensor, recent: Tensor, count: int):
        """Sample `count` of the query tokens, evenly spaced, including the last.

        q (T, Hq, D) holds rotated queries, newest last. Of the rotated keys, `keys` (Hkv, N, D) are
        the prefix and `recent` (Hkv, M, D) follow it, at least one; the last T of all are the query
        tokens' own. Query tokens of the prefix itself, of which a prompt may have some, are
        ignored.
        """
        self._rows = q[-min(len(q), recent.shape[1]) :]
        self._count = min(count, len(self._rows))
        self.keys = keys
        self._recent = recent

    @cached_property
    def q(self) -> Tensor:
        """The sampled queries (Hkv, G, R, D), scaled."""
        by_head = self._rows[self._ends - 1].unflatten(1, (len(self.keys), -1))  # (R, Hkv, G, D)
        return by_head.permute(1, 2, 0, 3) * self._rows.shape[-1] ** -0.5

    def chunk_attention(self, chunk: int, previous: Tensor | None = None) -> Tensor:
        """Attention to chunks of the prefix, (Hkv, C) float32, plus decayed scores.

        A key's is its maximum over query tokens, averaged over the query heads that share it.
        `previous` scores (Hkv, c) are those of the first chunks.
        """
        groups = self._rows.shape[1] // len(self.keys)
        kernels = scoring_kernels(self.keys, self._count, groups, chunk)
        if kernels is not None:
            args = self._rows, self.keys, self._recent, self._count, chunk
            return kernels.chunk_scores(*args, previous, SCORE_DECAY)
        weights = self.attention.amax(2).mean(1)  # (Hkv, N)
        scores = weights.unflatten(1, (-1, chunk)).sum(-1)
        if previous is not None:
            scores[:, : previous.shape[1]].add_(previous, alpha=SCORE_DECAY)
        return scores

    @cached_property
    def attention(self) -> Tensor:
        """Attention of each query to each key of the prefix, (Hkv, G, R, N) float32.

        A query's weights sum to 1 over the prefix and the recent keys.
        """
        indices = torch.arange(self._recent.shape[1], device=self.q.device)
        # recent keys visible to each query
        visible = self._ends + (self._recent.shape[1] - len(self._rows))
        hidden = indices >= visible[:, None]  # (R, M)
        recent = self._scores(self._recent).masked_fill(hidden, -torch.inf)
        weights = self._scores(self.keys)
        highest = torch.maximum(weights.amax(-1), recent.amax(-1))[..., None]
        weights.sub_(highest)
        weights.exp_()
        recent.sub_(highest)
        recent.exp_()
        total = weights.sum(-1, keepdim=True) + recent.sum(-1, keepdim=True)
        return weights.div_(total)

    @cached_property
    def _ends(self) -> Tensor:
        """The number of query tokens up to each sampled one, (R,)."""
        counts = torch.arange(1, self._count + 1, device=self._rows.device)
        return counts * len(self._rows) // self._count

    def _scores(self, keys: Tensor) -> Tensor:
        """Return q . k of keys (Hkv, N, D), (Hkv, G, R, N) float32."""
        rows = self.q.flatten(1, 2)  # (Hkv, G * R, D)
        if keys.is_cpu and keys.dtype != torch.float32:
            # a batched product is slower here than one head after another
            pairs = zip(rows, keys, strict=True)
            scores = torch.stack([_product(keys, q.T) for q, keys in pairs])
        else:
            scores = keys @ rows.transpose(1, 2)  # (Hkv, N, G * R): the faster order on a CPU
        scores = scores.transpose(1, 2).float()
        return scores.contiguous().unflatten(1, self.q.shape[1:3])


def scoring_kernels(keys: Tensor, count: int, groups: int, chunk: int) -> ModuleType | None:
    """Return `offload.kernels.retrieval` if it can score chunks of keys (Hkv, N, D), or None.

    Each KV head has `count` query tokens of `groups` query heads.
    """
    kernels, _ = retrieval_kernels(keys.device.type, keys.dtype, keys.shape[-1], groups)
    if kernels is None or not kernels.supports(count, groups, chunk):
        return None
    return kernels


class SelectionPolicy(ABC):
    """A ranking of the prefix's chunks, for all layers and heads of one sequence."""

    spec: ClassVar[PolicySpec]
    scores_by_attention = False  # whether there are kernels for it, without scratch memory

    @abstractmethod
    def scores(self, sample: QuerySample, layer: int, head: int, chunk: int) -> Tensor:
        """Return the score (Hkv, C) float32 of each of the C whole chunks of `chunk` tokens.

        The sample's KV heads are `head`, `head` + 1, ... of the layer. The first chunk's score is
        infinite.
        """

    def select(self, sample: QuerySample, layer: int, head: int, chunk: int, count: int) -> Tensor:
        """Return the indices (Hkv, count) of the chunks to keep per KV head.

        Chunk 0, the sink, is always kept: its score is infinite.
        """
        scores = self.scores(sample, layer, head, chunk)
        return scores.topk(count, dim=1, sorted=False).indices


class MeanKeyPolicy(SelectionPolicy):
    """The selection as published: once, by the last prompt token's query against mean keys.

    Source: TriForce, arXiv 2404.11912, section 4.1.
    """

    spec = POLICY_SPECS["static"]

    def scores(self, sample: QuerySample, layer: int, head: int, chunk: int) -> Tensor:
        means = _mean_keys(sample.keys, chunk)
        logits = sample.q.flatten(1, 2).float() @ means.transpose(1, 2)  # (Hkv, G, C)
        # in logarithms, so that chunks of negligible weight are still ordered
        scores = logits.log_softmax(-1).logsumexp(1)
        scores[:, 0] = torch.inf
        return scores


class AttentionScorePolicy(SelectionPolicy):
    """The attention weights of this forward, plus decayed weights of earlier ones.

    A key's score is its maximum over query tokens, averaged over the query heads that share it: a
    key that one query needs matters, however little the others attend to it. Summing over forwards
    is H2O's idea (Zhang et al. 2023, arXiv 2306.14048, section 4.1); the decay is new.
    """

    spec = POLICY_SPECS["attention"]
    scores_by_attention = True

    def __init__(self) -> None:
        # a layer's last scores (Hkv, C), and those of its heads so far: they arrive in order, in
        # groups of any size
        self._last: dict[int, Tensor] = {}
        self._parts: dict[int, list[Tensor]] = {}

    def scores(self, sample: QuerySample, layer: int, head: int, chunk: int) -> Tensor:
        parts = self._parts.setdefault(layer, [])
        if not head:
            if parts and layer not in self._last:  # only now it is known that they are all
                self._last[layer] = torch.cat(parts)
            parts.clear()
        last = self._last.get(layer)
        if last is not None and len(last) < head + len(sample.keys):
            last = None  # a forward that ended early
        previous = None if last is None else last[head : head + len(sample.keys)]
        scores = sample.chunk_attention(chunk, previous)
        if previous is None:
            scores[:, 0] = torch.inf  # and for good, since it is added to all later ones
        parts.append(scores)
        if last is not None and sum(map(len, parts)) == len(last):
            self._last[layer] = scores if len(parts) == 1 else torch.cat(parts)
            parts.clear()
        return scores


class Placement(NamedTuple):
    """Where a layer's tokens are."""

    base: int  # position of the window's first token
    selected: int  # number of selected tokens before it


@dataclass
class Selector:
    """Decides when chunks of the prefix are selected, and which; the state is one sequence's."""

    policy: SelectionPolicy
    shape: RetrievalCacheSpec
    min_interval: int  # minimum tokens between selections; 1: select in every verification
    base: int = 0  # position of the first token after the prefix, at the last selection
    selected: int = 0  # number of selected tokens of that prefix
    selections: int = 0
    selected_at: int | None = None  # length of the sequence at the last selection
    is_selecting: bool = False  # whether the target's last forward selects
    previous: Placement | None = None  # before that, if it differs

    @property
    def placement(self) -> Placement:
        """Return where the tokens of a layer are that the target's last forward has passed."""
        return Placement(self.base, self.selected)

    def reset(self) -> None:
        """Discard the sequence's state: the next forward selects."""
        self.policy = type(self.policy)()
        self.base = self.selected = self.selections = 0
        self.selected_at = self.previous = None

    def begin(self, boundary: int, length: int, end: int, recent: int | None = None) -> None:
        """Decide whether a forward of the target selects; arguments as in `on_forward`.

        `recent` tokens of the budget are not for selected ones: by default those after the
        boundary.
        """
        previous, self.previous = self.placement, None
        # in decoding the first token of a forward is already accepted
        length += end > length
        self.is_selecting = self._is_due(length)
        if self.is_selecting:
            self.base = boundary
            recent = end - boundary if recent is None else recent
            self.selected = self.shape.selected(boundary, recent)
            self.selected_at = length
            self.selections += 1
        if previous != self.placement:
            self.previous = previous

    def select_by_parts(
        self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the chunks (h, n) of a few heads, after the first of them and their prefix.

        The arguments, those of `select`, are of more heads. Plain operations score
        `OBSERVED_KEYS` keys at a time, fused kernels all.
        """
        count, tokens = prefix.shape[1:3]
        group = q.shape[1] // count  # query heads per KV head
        step = max(1, OBSERVED_KEYS // max(1, tokens))  # KV heads
        rows = min(self.policy.spec.query_rows, len(q), recent.shape[1])
        if self.policy.scores_by_attention and scoring_kernels(
            prefix[0], rows, group, self.shape.chunk
        ):
            step = count
        for first in range(0, count, step):
            last = first + step
            queries = q[:, first * group : last * group]
            part, keys = prefix[:, first:last], recent[first:last]
            yield head + first, part, self.select(layer, head + first, queries, part, keys)

    def select(self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor) -> Tensor:
        """Return the chunks (h, n) of the prefix to keep for the heads from `head` on.

        q (T, h * G, D), prefix (2, h, N, D), recent keys (h, M, D).
        """
        chunk = self.shape.chunk
        heads, tokens = prefix.shape[1:3]
        if self.selected == tokens:
            return torch.arange(tokens // chunk, device=prefix.device).expand(heads, -1)
        sample = QuerySample(q, prefix[0], recent, self.policy.spec.query_rows)
        return self.policy.select(sample, layer, head, chunk, self.selected // chunk)

    def check_crop(self, length: int) -> None:
        """Raise ValueError if `length` is within the prefix that was selected from."""
        if length < self.base:
            raise ValueError(
                f"cannot crop to {length} tokens: the selection covers the first {self.base}"
            )

    def _is_due(self, length: int) -> bool:
        if self.selected_at is None:
            return True
        return self.policy.spec.reselects and length - self.selected_at >= self.min_interval


def _product(keys: Tensor, q: Tensor) -> Tensor:
    """Return keys (N, D) @ q (D, R), both in 16 bits, on a CPU."""
    if has_native_bf16():
        return keys @ q
    return keys.float() @ q.float()


def _mean_keys(keys: Tensor, chunk: int) -> Tensor:
    """Return the mean (Hkv, C, D) float32 of each chunk of keys (Hkv, N, D)."""
    # one head at a time, (C, chunk, D)
    by_head = (head_keys.unflatten(0, (-1, chunk)) for head_keys in keys)
    return torch.stack([chunks.mean(1, dtype=torch.float32) for chunks in by_head])


POLICIES: dict[str, type[SelectionPolicy]] = {
    "attention": AttentionScorePolicy,
    "static": MeanKeyPolicy,
}
