"""Sharded layers: the shard rule beside the layer, the collective in plain sight.

Source: Shoeybi et al. 2019, Megatron-LM, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from parallel.batch_invariant import map_blocks
from parallel.config.model_config import ModelConfig
from parallel.formats.checkpoint import Checkpoint
from parallel.ranks.partition import vocab_rows
from parallel.ranks.process_group import AsyncSum, TensorParallelGroup
from parallel.weights.matrix import Matrix, empty_parameter
from parallel.weights.packed import Slice, reorder_heads


class RMSNorm(Module):
    """x / rms(x) * weight, with the mean square in float32 (Zhang and Sennrich 2019).

    If `in_float32`, the weight is in float32 in any model, and multiplies before the result is
    rounded; with `has_offset` it is stored less 1 (transformers, modeling_gemma3.py).
    """

    def __init__(self, size: int, eps: float, in_float32: bool = False, has_offset: bool = False):
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps
        self.in_float32, self.has_offset = in_float32, has_offset

    def load(self, checkpoint: Checkpoint, name: str) -> None:
        """Read the tensor NAME.weight (size,)."""
        load_norm(self.weight, checkpoint, name, self.has_offset)

    def forward(self, x: Tensor) -> Tensor:
        return map_blocks(lambda rows: rms_norm(rows, self.weight, self.eps), x)


class LayerNorm(RMSNorm):
    """(x - mean) / standard deviation * weight, in float32 (Ba et al. 2016, arXiv 1607.06450)."""

    def forward(self, x: Tensor) -> Tensor:
        return map_blocks(self._norm, x)

    def _norm(self, x: Tensor) -> Tensor:
        weight = self.weight.float()
        return F.layer_norm(x.float(), weight.shape, weight, None, self.eps).to(x.dtype)


def make_norm(config: ModelConfig) -> RMSNorm:
    """Return a norm of hidden states."""
    if config.is_cohere:
        return LayerNorm(config.hidden, config.norm_eps)
    return RMSNorm(config.hidden, config.norm_eps, config.float32_norms, config.offset_norms)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm over the last dimension of x; a float32 weight multiplies in float32."""
    if x.dtype == weight.dtype:  # saves two calls a norm
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def unweighted_norm(x: Tensor, size: int, eps: float) -> Tensor:
    """Return x (T, n * size), each `size` dimensions of which are divided by their rms."""

    def normed(rows: Tensor) -> Tensor:
        parts = rows.float().unflatten(-1, (-1, size))
        return F.rms_norm(parts, (size,), None, eps).to(x.dtype).flatten(1)

    return map_blocks(normed, x)


def load_norm(weight: Tensor, checkpoint: Checkpoint, name: str, has_offset: bool) -> None:
    """Fill a norm's weight from the tensor NAME.weight; some safetensors have it less 1."""
    tensor = checkpoint.tensor(f"{name}.weight", tuple(weight.shape))[:]
    if has_offset and not checkpoint.is_converted:
        tensor = 1 + tensor.float()
    weight.copy_(tensor)


class HeadNorms(Module):
    """The RMSNorms of each head's queries and of its keys, replicated on every rank."""

    def __init__(
        self,
        head_dim: int,
        eps: float,
        in_float32: bool = False,
        has_offset: bool = False,
        query_multiplier: float = 1.0,
    ):
        """`in_float32` and `has_offset`: as in `RMSNorm`; queries are multiplied as well."""
        super().__init__()
        self.weights = empty_parameter(2, head_dim)
        self.eps = eps
        self.in_float32, self.has_offset = in_float32, has_offset
        self.query_multiplier = query_multiplier

    def load(self, checkpoint: Checkpoint, names: Sequence[str]) -> None:
        """Read the tensors NAME.weight (head_dim,)."""
        for name, weight in zip(names, self.weights, strict=True):
            load_norm(weight, checkpoint, name, self.has_offset)
        self.weights[0] *= self.query_multiplier

    def forward(self, parts: Sequence[Tensor], first: int = 0) -> list[Tensor]:
        """Normalize queries and keys (T, heads * head_dim), or those from `first` on."""
        normed = []
        for x, weight in zip(parts, self.weights[first:], strict=True):
            normed.append(map_blocks(partial(self._norm, weight), x))
        return normed

    def _norm(self, weight: Tensor, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, len(weight)))
        return rms_norm(heads, weight, self.eps).flatten(1)


class RotatedHeadNorms(HeadNorms):
    """The RMSNorms of each head's queries and keys after their rotation.

    A rotation does not change a head's mean square, so all but the weights is applied before it.
    Rotated queries are multiplied by the weights of both (`query_weight`), which leaves keys
    without: the products are the same. Source: transformers, modeling_hunyuan_v1_dense.py.
    """

    @property
    def query_weight(self) -> Tensor:
        """The weights (head_dim,) by which rotated queries are multiplied."""
        return self.weights.float().prod(0).to(self.weights.dtype)

    def _norm(self, weight: Tensor, x: Tensor) -> Tensor:
        heads = x.float().unflatten(-1, (-1, len(weight)))
        return F.rms_norm(heads, weight.shape, None, self.eps).to(x.dtype).flatten(1)


class WidthNorms(Module):
    """The RMSNorms of a token's queries, and of its keys, over all heads of all ranks.

    The sums of squares of both are combined in one all-reduce.
    """

    def __init__(
        self, group: TensorParallelGroup, widths: Sequence[int], units: Sequence[int], eps: float
    ):
        """`units`: rows of each that must stay on the same rank."""
        super().__init__()
        self.group = group
        self.widths = widths
        self.shares = [group.share(width, unit) for width, unit in zip(widths, units, strict=True)]
        self.sizes = [share.stop - share.start for share in self.shares]
        self.weight = empty_parameter(sum(self.sizes))
        self.eps = eps

    def load(self, checkpoint: Checkpoint, names: Sequence[str]) -> None:
        """Read this rank's part of each tensor NAME.weight (width,)."""
        parts = self.weight.split(self.sizes)
        for name, width, share, part in zip(names, self.widths, self.shares, parts, strict=True):
            part.copy_(checkpoint.tensor(f"{name}.weight", (width,))[share])

    def forward(self, parts: Sequence[Tensor], first: int = 0) -> list[Tensor]:
        """Normalize queries and keys (T, width / ranks), or those from `first` on."""
        # (T, parts): tokens first, as all-reduce expects
        squares = torch.stack([map_blocks(_square_sums, x) for x in parts], dim=1)
        squares = self.group.all_reduce(squares).t()
        normed = []
        weights = self.weight.split(self.sizes)[first:]
        for x, weight, width, square in zip(
            parts, weights, self.widths[first:], squares, strict=True
        ):
            scale = map_blocks(torch.rsqrt, square / width + self.eps)
            normed.append((x.float() * scale[:, None] * weight).to(x.dtype))
        return normed


def _square_sums(x: Tensor) -> Tensor:
    return x.float().square().sum(-1)


class ColumnParallelLinear(Module):
    """y = x W^T + b with the output dimension split over ranks.

    Several matrices with the same input are stacked into one matrix product.
    """

    def __init__(
        self,
        group: TensorParallelGroup,
        inputs: int,
        outputs: Sequence[int],
        bias: bool,
        units: Sequence[int] | None = None,
        by_unit: bool = False,
    ):
        """Allocate this rank's part.

        Args:
            group: the ranks.
            inputs: the input dimension.
            outputs: rows of each matrix.
            bias: whether there is one.
            units: rows of each matrix that must stay on the same rank, such as a head's.
            by_unit: a tensor in which the matrices are stacked has a unit of each in turn.
        """
        super().__init__()
        self.inputs = inputs
        self.outputs = outputs
        self.units, self.by_unit = units or [1] * len(outputs), by_unit
        self.shares = [
            group.share(output, unit) for output, unit in zip(outputs, self.units, strict=True)
        ]
        self.sizes = [share.stop - share.start for share in self.shares]
        self.weight = Matrix(sum(self.sizes), inputs)
        self.bias = empty_parameter(sum(self.sizes)) if bias else None

    def load(self, checkpoint: Checkpoint, names: Sequence[str]) -> None:
        """Read this rank's rows of each tensor NAME.weight (Dout, Din), and of each NAME.bias.

        A single name for several matrices refers to a tensor in which they are stacked.
        """
        weights = self._slices(checkpoint, [f"{name}.weight" for name in names], (self.inputs,))
        self.weight.load(weights)
        if self.bias is not None:
            biases = self._slices(checkpoint, [f"{name}.bias" for name in names], ())
            self.bias.copy_(torch.cat([tensor[rows] for tensor, rows, _ in biases]))

    def deinterleave(self, matrices: int, head_dim: int, rotary_dim: int) -> None:
        """Reorder the rows of each head of the first matrices: of pairs, first rows come first.

        Of the first `rotary_dim` rows, 0, 2, 4 and so on are followed by 1, 3, 5 and so on: RoPE
        that rotates adjacent dimensions becomes one that rotates halves.
        """
        rows = torch.arange(head_dim, device=self.weight.device)
        order = torch.cat((rows[:rotary_dim:2], rows[1:rotary_dim:2], rows[rotary_dim:]))
        count = sum(self.sizes[:matrices])
        self.weight.reorder_heads(order, count)
        if self.bias is not None:
            reorder_heads(self.bias[:count], order)

    def _slices(
        self, checkpoint: Checkpoint, names: Sequence[str], inner: tuple[int, ...]
    ) -> list[Slice]:
        """Return this rank's rows of each tensor NAME (Dout, *inner), or of one stacked tensor."""
        fused = len(names) < len(self.outputs)
        slices = []
        for index, (size, share) in enumerate(zip(self.outputs, self.shares, strict=True)):
            name = names[0] if fused else names[index]
            height = sum(self.outputs) if fused else size
            tensor = checkpoint.tensor(name, (height, *inner))
            for rows in self._stacked_rows(index) if fused else [share]:
                slices.append(Slice(tensor, rows, slice(0, self.inputs)))
        return slices

    def _stacked_rows(self, index: int) -> list[slice]:
        """Return which rows of a tensor of all matrices are this rank's of one of them."""
        share, unit = self.shares[index], self.units[index]
        if not self.by_unit:
            offset = sum(self.outputs[:index])
            return [slice(offset + share.start, offset + share.stop)]
        step, offset = sum(self.units), sum(self.units[:index])
        starts = [offset + step * (row // unit) for row in range(share.start, share.stop, unit)]
        return [slice(start, start + unit) for start in starts]

    def forward(self, x: Tensor, first: int = 0) -> list[Tensor]:
        """Return one product (T, Dout / ranks) for each matrix from `first` on; x is (T, Din)."""
        skipped = sum(self.sizes[:first])
        bias = None if self.bias is None else self.bias[skipped:]
        return list(self.weight.product(x, bias, skipped).split(self.sizes[first:], dim=-1))


class RowParallelLinear(Module):
    """y = x W^T + b with the input dimension split over ranks.

    The partial products are summed in one all-reduce.
    """

    def __init__(
        self, group: TensorParallelGroup, inputs: int, outputs: int, bias: bool, unit: int = 1
    ):
        """`unit`: columns that must stay on the same rank."""
        super().__init__()
        self.group = group
        self.inputs = inputs
        self.outputs = outputs
        self.share = group.share(inputs, unit)
        self.weight = Matrix(outputs, self.share.stop - self.share.start)
        self.bias = empty_parameter(outputs) if bias else None

    def load(self, checkpoint: Checkpoint, name: str) -> None:
        """Read this rank's columns of the tensor NAME.weight (Dout, Din), and all of NAME.bias."""
        weight = checkpoint.tensor(f"{name}.weight", (self.outputs, self.inputs))
        self.weight.load([Slice(weight, slice(0, self.outputs), self.share)])
        if self.bias is not None:
            self.bias.copy_(checkpoint.tensor(f"{name}.bias", (self.outputs,))[:])

    def forward(self, x: Tensor) -> AsyncSum:
        """Start the all-reduce, which returns (T, Dout) when awaited; x is (T, Din / ranks)."""
        total = self.group.start_all_reduce(self.weight.product(x))
        bias = self.bias
        return total if bias is None else lambda: total() + bias


class SinkLogits(Module):
    """A learned logit of each head (attention sink), in its softmax beside those of the keys.

    It has no value, so a head may attend to little. Source: OpenAI 2025, gpt-oss model card, arXiv
    2508.10925, section 2.2.
    """

    def __init__(self, group: TensorParallelGroup, heads: int, unit: int):
        """`unit`: query heads that share a KV head, and so a rank."""
        super().__init__()
        self.heads, self.share = heads, group.share(heads, unit)
        self.logits = empty_parameter(self.share.stop - self.share.start)

    def load(self, checkpoint: Checkpoint, name: str) -> None:
        """Read this rank's part of the tensor NAME (heads,)."""
        self.logits.copy_(checkpoint.tensor(name, (self.heads,))[self.share])

    def forward(self, out: Tensor, lse: Tensor) -> Tensor:
        """Return attention out (T, H, D), given its log-sum-exp (T, H), with the sinks' share."""
        return map_blocks(self._with_sinks, out, lse)

    def _with_sinks(self, out: Tensor, lse: Tensor) -> Tensor:
        share_of_keys = torch.sigmoid(lse - self.logits.float())
        return out.mul_(share_of_keys[..., None])  # in place: of a chunk it takes much memory


class VocabParallelEmbedding(Module):
    """A token embedding, LM head, or both (tied), with the vocabulary split over ranks.

    All ranks have the same number of rows, as all-gather requires; rows past the vocabulary pad the
    last ranks and hold zeros.
    """

    def __init__(self, group: TensorParallelGroup, vocab: int, hidden: int):
        super().__init__()
        self.group = group
        self.vocab = vocab
        rows = vocab_rows(vocab, group.size)
        self.first = min(rows * group.rank, vocab)
        self.last = min(self.first + rows, vocab)
        self.weight = Matrix(rows, hidden)

    def load(self, checkpoint: Checkpoint, name: str) -> None:
        """Read this rank's rows of the tensor NAME.weight (V, hidden)."""
        columns = self.weight.columns
        weight = checkpoint.tensor(f"{name}.weight", (self.vocab, columns))
        self.weight.load([Slice(weight, slice(self.first, self.last), slice(0, columns))])

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens (T,) as (T, hidden). A token's rank looks it up, the others add zero."""
        if self.group.size == 1:
            return self.weight.select(tokens)
        local = tokens - self.first
        foreign = (tokens < self.first) | (tokens >= self.last)
        x = self.weight.select(local.masked_fill(foreign, 0)).masked_fill(foreign[:, None], 0)
        return self.group.all_reduce(x)

    def logits(self, x: Tensor) -> Tensor:
        """Return logits (T, V) float32 of hidden states x (T, hidden)."""
        return self.group.all_gather(self.weight.logits(x))[:, : self.vocab]
