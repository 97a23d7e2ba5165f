"""The bytes of a rank's weights, computed from the config without building the model.

Does not import torch. `parallel.weights` allocates by the same rules.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator
from functools import cache
from typing import NamedTuple

from parallel.config.families import MlpNames
from parallel.config.layer_heads import LatentShape
from parallel.config.model_config import ModelConfig
from parallel.config.parameter_count import (
    expert_parameters,
    float32_parameters,
    has_experts,
    has_mlp,
    has_window,
    head_rows,
    head_shape,
    is_recurrent,
    kv_projections,
    layer_name,
    mixer_name,
    mlp_inputs,
    parameter_count,
    query_projections,
    recurrent_rows,
)
from parallel.config.recurrent import head_shares, rank_shape
from parallel.formats.plane_format import PlaneFormat, is_kept, kept_bytes
from parallel.formats.weight_headers import EMBEDDING, HEAD, PREDICTION
from parallel.ranks.partition import share, share_size, vocab_rows


class WeightSizes(NamedTuple):
    """The weights on one rank."""

    nbytes: int  # bytes of all weights
    embedding: int  # those of them that a forward does not read, but for its tokens' rows
    kept: int = 0  # number of weights that are packed, and read
    kept_plain: int = 0  # those of them for which there are no kernels
    scratch: int = 0  # bytes in which a layer's packed matrices are unpacked
    cut: int = 0  # matrices that would be packed, if this rank's columns were whole blocks
    experts: int = 0  # bytes of all experts
    kept_experts: int = 0  # number of their weights that are packed
    whole_experts: int = 0  # number of those that are not
    shared: int = 0  # bytes of the target's head, which a prediction block reads as well


class _Part(NamedTuple):
    """A rank's part of a tensor."""

    tensor: str
    rows: int
    columns: slice

    @property
    def size(self) -> int:
        """The number of weights."""
        return self.rows * (self.columns.stop - self.columns.start)


@cache
def weight_sizes(
    config: ModelConfig, ranks: int, itemsize: int, rank: int | None = None
) -> WeightSizes:
    """Return the sizes of one rank's weights.

    Args:
        config: matrices stay packed as its `kept_types` say.
        ranks: that share the model.
        itemsize: bytes of a weight that is not packed.
        rank: by default the one whose weights take most; middle ranks cut blocks at both ends.
    """
    if rank is None:
        own = range(ranks) if config.kept_types else [ranks - 1]
        sizes = [weight_sizes(config, ranks, itemsize, each) for each in own]
        largest = max(sizes, key=lambda each: each.nbytes + each.scratch)
        return largest._replace(cut=max(each.cut for each in sizes))
    nbytes = parameter_count(config, ranks, rank) * itemsize
    nbytes += float32_parameters(config, ranks, rank) * (4 - itemsize)
    vocabulary = vocab_rows(config.vocab, ranks) * config.hidden * itemsize
    embedding = 0 if config.tied or config.is_predictor else vocabulary
    shared = vocabulary if config.is_predictor else 0
    types = dict(config.kept_types)
    whole_experts = expert_parameters(config, ranks, rank)
    experts = whole_experts * itemsize
    kept = kept_plain = cut = kept_experts = 0
    scratch: dict[str, int] = {}  # matrix of a layer -> bytes
    for matrix, parts in _matrices(config, ranks, rank, types) if types else ():
        packable = [part for part in parts if part.tensor in types]
        packed = [part for part in packable if is_kept(types[part.tensor], part.columns)]
        cut += len(packable) - len(packed)
        for part in packed:
            own_bytes = kept_bytes(types[part.tensor], part.rows, part.columns)
            saved = part.size * itemsize - own_bytes
            if config.is_predictor and matrix is None:
                shared -= saved
            else:
                nbytes -= saved
            if part.tensor == EMBEDDING and not config.tied:
                embedding = own_bytes
            else:
                kept += part.size
                kept_plain += 0 if isinstance(types[part.tensor], PlaneFormat) else part.size
        is_shared = config.is_predictor and matrix != "fc"  # unpacked where its target's are
        if packed and matrix is not None and not is_shared:
            size = sum(part.size for part in parts) * itemsize
            scratch[matrix] = max(scratch.get(matrix, 0), size)
    for parts in _stacks(config, ranks, rank) if types else ():
        kinds = {types.get(part.tensor) for part in parts}
        kind, size = next(iter(kinds)), sum(part.size for part in parts)
        if len(kinds) > 1 or kind is None:
            continue
        if not is_kept(kind, parts[0].columns):
            cut += len(parts)
            continue
        own_bytes = sum(kept_bytes(kind, part.rows, part.columns) for part in parts)
        nbytes -= size * itemsize - own_bytes
        experts -= size * itemsize - own_bytes
        kept_experts += size
    return WeightSizes(
        nbytes,
        embedding,
        kept + kept_experts,
        kept_plain,
        sum(scratch.values()),
        cut,
        experts,
        kept_experts,
        whole_experts - kept_experts,
        shared,
    )


def matrix_columns(config: ModelConfig) -> dict[str, int]:
    """Return the columns of each matrix, by its name in a checkpoint, with {} for all experts."""
    parts = [*(parts for _, parts in _matrices(config, 1, 0, ())), *_stacks(config, 1, 0)]
    return {part.tensor: part.columns.stop for stack in parts for part in stack}


def _stacks(config: ModelConfig, ranks: int, rank: int) -> Iterator[list[_Part]]:
    """Yield a rank's stacks of the matrices of all experts: the tensors of each."""
    mixture = config.experts
    if mixture is None:
        return
    inner = share(mixture.intermediate, rank, ranks)
    rows = mixture.count * (inner.stop - inner.start)
    names = mixture.names
    for layer in sorted(mixture.layers):
        prefix = f"{layer_name(config, layer, of_mlp=True)}.{names.experts}.{{}}"
        yield [
            _Part(f"{prefix}.{name}.weight", rows, slice(0, config.hidden))
            for name in (names.gate, names.up)[-mlp_inputs(config) :]
        ]
        yield [_Part(f"{prefix}.{names.down}.weight", mixture.count * config.hidden, inner)]


def _matrices(
    config: ModelConfig, ranks: int, rank: int, types: Collection[str]
) -> Iterator[tuple[str | None, list[_Part]]]:
    """Yield a rank's matrices, without experts: their name in a layer, and what they stack.

    `types`: names of tensors that can be packed.
    """
    hidden, all_columns = config.hidden, slice(0, config.hidden)
    vocab = vocab_rows(config.vocab, ranks)
    names = [EMBEDDING] if config.tied else [EMBEDDING, HEAD]
    for name in names[-1:] if config.is_predictor else names:
        yield None, [_Part(name, vocab, all_columns)]
    if config.is_predictor:
        yield "fc", [_Part(f"{PREDICTION}fc.weight", hidden, share(2 * hidden, rank, ranks))]
    inner = share(config.intermediate, rank, ranks)
    for layer in range(config.layers):
        prefix = layer_name(config, layer, of_mlp=True)
        if is_recurrent(config, layer):
            yield from _recurrent(config, ranks, rank, layer, types)
        else:
            yield from _attention(config, ranks, rank, layer)
        mixture = config.experts if has_experts(config, layer) else None
        if mixture is not None and mixture.shared is not None:
            own = share(mixture.shared, rank, ranks)
            shared = _mlp(config, prefix, mixture.names.shared, own, types)
            yield from ((f"shared_{name}", parts) for name, parts in shared)
        if has_mlp(config, layer):
            yield from _mlp(config, prefix, config.mlp_names, inner, types)


def _mlp(
    config: ModelConfig, prefix: str, names: MlpNames, inner: slice, types: Container[str]
) -> Iterator[tuple[str, list[_Part]]]:
    """Yield a rank's matrices of an MLP: its `inner` rows of gate and up, and columns of down."""
    rows, hidden = inner.stop - inner.start, slice(0, config.hidden)
    inputs = names.inputs(prefix, types)
    # a single name may stand for gate and up
    own = (inputs[0], inputs[-1])[: mlp_inputs(config)]
    yield "gate_up", [_Part(f"{name}.weight", rows, hidden) for name in own]
    yield "down", [_Part(f"{prefix}.{names.block}.{names.down}.weight", config.hidden, inner)]


def _attention(
    config: ModelConfig, ranks: int, rank: int, layer: int
) -> Iterator[tuple[str, list[_Part]]]:
    """Yield a rank's matrices of a layer's attention."""
    prefix = f"{layer_name(config, layer)}.{mixer_name(config, layer)}"
    windowed = has_window(config, layer)
    if config.latent is not None:
        yield from _latent_attention(config, config.latent, ranks, rank, prefix)
        return
    shape = head_shape(config, windowed)
    query_unit, key_unit = head_rows(shape)
    own_queries = share(shape.heads * query_unit, rank, ranks, query_unit)
    key_rows = share_size(shape.heads * key_unit, rank, ranks, key_unit)
    heads = {"q": query_projections(config) * (own_queries.stop - own_queries.start)}
    heads |= dict.fromkeys("kv"[: kv_projections(config, windowed)], key_rows)
    projections = [
        _Part(
            f"{prefix}.{'qkv' if config.fused_qkv else name}_proj.weight",
            rows,
            slice(0, config.hidden),
        )
        for name, rows in heads.items()
    ]
    yield "qkv", projections
    yield "o", [_Part(f"{prefix}.o_proj.weight", config.hidden, own_queries)]


def _latent_attention(
    config: ModelConfig, shape: LatentShape, ranks: int, rank: int, prefix: str
) -> Iterator[tuple[str, list[_Part]]]:
    """Yield a rank's matrices of a layer's latent attention, but for the projections of latents."""
    hidden, query_rank = slice(0, config.hidden), shape.query_rank
    inputs = [_Part(f"{prefix}.kv_a_proj_with_mqa.weight", shape.head_dim, hidden)]
    queries, columns = "q_proj", hidden
    if query_rank is not None:
        inputs.insert(0, _Part(f"{prefix}.q_a_proj.weight", query_rank, hidden))
        queries, columns = "q_b_proj", slice(0, query_rank)
    yield "inputs", inputs
    rows = share_size(config.heads * shape.query_dim, rank, ranks, shape.query_dim)
    yield "q", [_Part(f"{prefix}.{queries}.weight", rows, columns)]
    values = share(config.heads * shape.value_dim, rank, ranks, shape.value_dim)
    yield "o", [_Part(f"{prefix}.o_proj.weight", config.hidden, values)]


def _recurrent(
    config: ModelConfig, ranks: int, rank: int, layer: int, types: Collection[str]
) -> Iterator[tuple[str, list[_Part]]]:
    """Yield a rank's matrices of a recurrent layer's mixer.

    Over several ranks the columns of the output of tiled heads are not packed.
    """
    shape = config.recurrent
    assert shape is not None
    own, (_, values) = rank_shape(shape, rank, ranks), head_shares(shape, rank, ranks)
    columns = slice(values.start * shape.value_dim, values.stop * shape.value_dim)
    prefix = f"{layer_name(config, layer)}.{mixer_name(config, layer)}"
    width, heads = own.value_heads * own.value_dim, own.value_heads
    stacks = {"_qkvz": {"_qkv": own.channels, "_z": width}, "_ba": {"_b": heads, "_a": heads}}
    if shape.is_mamba:
        stacks = {"": {"": recurrent_rows(own)}}
    inputs = []
    for stack, parts in stacks.items():
        if f"{prefix}.in_proj{stack}.weight" in types:
            parts = {stack: sum(parts.values())}
        inputs += [
            _Part(f"{prefix}.in_proj{name}.weight", rows, slice(0, config.hidden))
            for name, rows in parts.items()
        ]
    yield "inputs", inputs
    if ranks == 1 or not shape.is_tiled:
        yield "out", [_Part(f"{prefix}.out_proj.weight", config.hidden, columns)]
