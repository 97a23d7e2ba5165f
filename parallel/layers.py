"""Sharded layers: the shard rule beside the layer, the collective in plain sight (Shoeybi et al.
2019, Megatron-LM, section 3).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter

from offload.layout import ceil_div
from parallel.checkpoint import TensorSlice
from parallel.group import Group


class RMSNorm(Module):
    """x / rms(x) * weight, with the mean square in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def load(self, weight: TensorSlice) -> None:
        self.weight.copy_(weight[:])

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class ColumnParallelLinear(Module):
    """y = x W^T + b with the output dimension split over ranks. Several matrices of one input are
    stacked into one product.
    """

    def __init__(self, group: Group, inputs: int, outputs: list[int], bias: bool):
        super().__init__()
        self.group = group
        self.shares = [group.share(size) for size in outputs]
        self.sizes = [share.stop - share.start for share in self.shares]
        self.weight = Parameter(torch.empty(sum(self.sizes), inputs), requires_grad=False)
        self.bias = Parameter(torch.empty(sum(self.sizes)), requires_grad=False) if bias else None

    def load(self, weights: list[TensorSlice], biases: list[TensorSlice]) -> None:
        """Each weight (Dout, Din), read lazily: only this rank's rows."""
        for rows, share, weight in zip(
            self.weight.split(self.sizes), self.shares, weights, strict=True
        ):
            rows.copy_(weight[share])
        if self.bias is not None:
            for rows, share, bias in zip(
                self.bias.split(self.sizes), self.shares, biases, strict=True
            ):
                rows.copy_(bias[share])

    # (T, Din) -> one (T, Dout / ranks) per matrix, from `first` on
    def forward(self, x: Tensor, first: int = 0) -> list[Tensor]:
        skipped = sum(self.sizes[:first])
        bias = None if self.bias is None else self.bias[skipped:]
        return list(F.linear(x, self.weight[skipped:], bias).split(self.sizes[first:], dim=-1))


class RowParallelLinear(Module):
    """y = x W^T + b with the input dimension split over ranks; the partial sums meet in one
    all-reduce.
    """

    def __init__(self, group: Group, inputs: int, outputs: int, bias: bool):
        super().__init__()
        self.group = group
        self.share = group.share(inputs)
        self.weight = Parameter(
            torch.empty(outputs, self.share.stop - self.share.start), requires_grad=False
        )
        self.bias = Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def load(self, weight: TensorSlice, bias: TensorSlice | None) -> None:
        """weight (Dout, Din), read lazily: only this rank's columns."""
        self.weight.copy_(weight[:, self.share])
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias[:])

    # (T, Din / ranks) -> (T, Dout), to be called for when it is needed
    def forward(self, x: Tensor) -> Callable[[], Tensor]:
        total = self.group.start_all_reduce(F.linear(x, self.weight))
        bias = self.bias
        return total if bias is None else lambda: total() + bias


class VocabParallelEmbedding(Module):
    """The vocabulary split over ranks: embeds tokens, and as the head of a model gives their
    logits.

    The split is even, so that every rank gathers the same; rows past the vocabulary pad the last
    ranks and hold zeros.
    """

    def __init__(self, group: Group, vocab: int, hidden: int):
        super().__init__()
        self.group, self.vocab = group, vocab
        rows = ceil_div(vocab, group.size)
        self.first = min(rows * group.rank, vocab)
        self.last = min(self.first + rows, vocab)
        self.weight = Parameter(torch.empty(rows, hidden), requires_grad=False)

    def load(self, weight: TensorSlice) -> None:
        self.weight[self.last - self.first :] = 0
        self.weight[: self.last - self.first] = weight[self.first : self.last]

    # (T,) -> (T, hidden); a token's owner knows it, the others add zero
    def forward(self, tokens: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.first
        foreign = (tokens < self.first) | (tokens >= self.last)
        x = F.embedding(local.masked_fill(foreign, 0), self.weight).masked_fill(foreign[:, None], 0)
        return self.group.all_reduce(x)

    def logits(self, x: Tensor) -> Tensor:  # (T, hidden) -> (T, V) float32
        return self.group.all_gather(F.linear(x, self.weight))[:, : self.vocab].float()
