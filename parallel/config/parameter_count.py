"""The number of a rank's parameters, computed from the config without building the model.

Does not import torch. The layers of `parallel.model.layers` allocate by the same rules.
"""

from __future__ import annotations

from offload.layout import HeadShape, RecurrentShape
from parallel.config.families import UNGATED
from parallel.config.layer_heads import LatentShape
from parallel.config.model_config import ModelConfig
from parallel.config.recurrent import rank_shape, split_heads
from parallel.formats.weight_headers import PREDICTION
from parallel.ranks.partition import share_size, vocab_rows

# Largest number of query tokens worth capturing as a CUDA graph: the longest draft at the retrieval
# level, and the two pending tokens.
MAX_GRAPH_TOKENS = 18
# Largest number of query tokens for which a GPU computes experts in static shapes, so that the host
# need not wait for the routing: more than those of a verification, which uses most experts anyway.
# Batched forwards of any model are captured up to the same size: beyond it, compute hides the
# kernel launches.
MAX_STATIC_TOKENS = 64
XIELU_NUMBERS = 4  # parameters of a layer's activation, if it is xIELU


def head_shape(config: ModelConfig, windowed: bool) -> HeadShape:
    """Return the KV heads of the layers with a window, or of the others, of the whole model."""
    if windowed and config.windowed_heads is not None:
        return config.windowed_heads
    return HeadShape(config.kv_heads, config.head_dim, config.heads // config.kv_heads)


def min_kv_heads(config: ModelConfig) -> int:
    """Return the KV heads of the layers that have fewest: over more ranks they cannot be split.

    Those of recurrent layers are their key heads, or the value heads that share a single one.
    Latent attention is split by query heads.
    """
    if config.latent is not None:
        return config.heads
    heads = [head_shape(config, windowed).heads for windowed in (False, True)]
    return min(heads if config.recurrent is None else [*heads, split_heads(config.recurrent)])


def windowed_layers(config: ModelConfig) -> int:
    """Return the number of layers with a window."""
    return 0 if config.sliding_window is None else len(config.sliding_window.layers)


def is_recurrent(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer has a recurrent state instead of attention."""
    return config.recurrent is not None and layer in config.recurrent.layers


def recurrent_layers(config: ModelConfig) -> int:
    """Return the number of layers with a recurrent state."""
    return 0 if config.recurrent is None else len(config.recurrent.layers)


def query_projections(config: ModelConfig) -> int:
    """Return the projections with as many rows as queries: two if outputs are gated."""
    return 2 if config.has_output_gates else 1


def has_window(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer has a sliding window."""
    return config.sliding_window is not None and layer in config.sliding_window.layers


def kv_projections(config: ModelConfig, windowed: bool) -> int:
    """Return the projections of keys and values in these layers: two, or one that they share."""
    return 1 if config.has_shared_values and not windowed else 2


def head_rows(shape: HeadShape) -> tuple[int, int]:
    """Return the rows of one KV head: of all query heads that share it, and of its key head."""
    return shape.groups * shape.dim, shape.dim


def layer_name(config: ModelConfig, layer: int, of_mlp: bool = False) -> str:
    """Return the name of a layer in the checkpoint: that of its mixer, or of its MLP."""
    index: int | None = layer
    if (split := config.split_layers) is not None:
        index = split.mlps[layer] if of_mlp else split.mixers[layer]
    return f"{PREDICTION if config.is_predictor else 'model.'}layers.{index}"


def mixer_name(config: ModelConfig, layer: int) -> str:
    """Return the name of a layer's attention or recurrent mixer in that of the layer."""
    if config.split_layers is not None:
        return "mixer"
    if config.recurrent is None or not is_recurrent(config, layer):
        return "self_attn"
    return "mamba" if config.recurrent.is_mamba else "linear_attn"


def parameter_count(config: ModelConfig, ranks: int, rank: int | None = None) -> int:
    """Return the number of parameters on one of `ranks` ranks.

    By default that of the last rank, which holds at least as many as any other.
    """
    rank = ranks - 1 if rank is None else rank
    embeddings = 0 if config.is_predictor else 1 if config.tied else 2
    mixtures = moe_layers(config)
    mlps = dense_layers(config)
    windowed = windowed_layers(config)
    return (
        embeddings * vocab_rows(config.vocab, ranks) * config.hidden
        + config.full_layers * _attention_parameters(config, ranks, rank, windowed=False)
        + windowed * _attention_parameters(config, ranks, rank, windowed=True)
        + recurrent_layers(config) * _recurrent_parameters(config, ranks, rank)
        + mlps * _mlp_parameters(config, ranks, rank)
        + mixtures * _router_parameters(config, ranks, rank)
        + expert_parameters(config, ranks, rank)
        + config.hidden  # final norm
        - config.hidden * single_branches(config)  # counted with mixers
        + (_input_parameters(config, ranks, rank) if config.is_predictor else 0)
    )


def max_gathered(experts: int) -> int:
    """Return the number of experts whose weights are gathered at once, where that is necessary."""
    return max(1, min(8, experts // 3))


def active_share(config: ModelConfig, tokens: int) -> float:
    """Return the expected share of the experts that a forward of `tokens` tokens reads.

    Routing is assumed to be uniform.
    """
    if config.experts is None:
        return 0.0
    return 1 - (1 - config.experts.per_token / config.experts.count) ** tokens


def _attention_parameters(config: ModelConfig, ranks: int, rank: int, windowed: bool) -> int:
    """Return a layer's parameters on a rank without those of its MLP, but with all norms."""
    if config.latent is not None:
        return _latent_parameters(config, config.latent, share_size(config.heads, rank, ranks))
    hidden, shape = config.hidden, head_shape(config, windowed)
    heads = share_size(shape.heads, rank, ranks)
    queries, keys = (heads * rows for rows in head_rows(shape))
    per_head = 2 * shape.dim
    qk_norms = {None: 0, "head": per_head, "rotated": per_head, "width": queries + keys}
    norms = config.norms.total * hidden + qk_norms[config.qk_norm]
    qkv = query_projections(config) * queries + kv_projections(config, windowed) * keys
    o = hidden * (queries + config.o_bias)
    sinks = queries // shape.dim if config.has_sinks else 0
    return norms + qkv * (hidden + config.qkv_bias) + o + sinks + config.is_gemma4


def _latent_parameters(config: ModelConfig, shape: LatentShape, heads: int) -> int:
    """Return `_attention_parameters` of latent attention with so many query heads."""
    hidden, queries = config.hidden, shape.query_rank or 0
    norms = config.norms.total * hidden + queries + shape.rank
    biases = (queries + shape.head_dim) * config.qkv_bias + hidden * config.o_bias
    return norms + biases + latent_weights(shape, hidden, heads)


def latent_weights(shape: LatentShape, hidden: int, heads: int) -> int:
    """Return the weights of the projections of latent attention with so many query heads."""
    inputs = hidden * ((shape.query_rank or 0) + shape.head_dim)
    per_head = shape.query_dim * (shape.query_rank or hidden) + shape.value_dim * hidden
    per_head += (shape.plain_dim + shape.value_dim) * shape.rank
    return inputs + heads * per_head


def _input_parameters(config: ModelConfig, ranks: int, rank: int) -> int:
    """Return the parameters of a prediction block before its layer: two norms, and a projection."""
    hidden = config.hidden
    return 2 * hidden + hidden * share_size(2 * hidden, rank, ranks)


def recurrent_rows(shape: RecurrentShape) -> int:
    """Return the rows of the input projections of a recurrent layer with these heads.

    Beside channels and gates there are betas and decays, or the step sizes of Mamba-2.
    """
    per_head = shape.value_dim + (1 if shape.is_mamba else 2)
    return shape.channels + shape.value_heads * per_head


def _recurrent_parameters(config: ModelConfig, ranks: int, rank: int) -> int:
    """Return a layer's parameters on a rank without those of its MLP, but with all norms."""
    if config.recurrent is None:
        return 0
    own = rank_shape(config.recurrent, rank, ranks)
    width = own.value_heads * own.value_dim
    others = own.channels * own.kernel_size + 2 * own.value_heads
    # Mamba-2 has biases of channels and numbers of heads as well, and a norm of the whole width
    others += own.channels + own.value_heads + width if own.is_mamba else own.value_dim
    projections = config.hidden * (recurrent_rows(own) + width)
    return config.norms.total * config.hidden + projections + others


def mlp_inputs(config: ModelConfig) -> int:
    """Return the projections that an MLP begins with: gate and up, or up alone."""
    return 1 if config.activation in UNGATED else 2


def _mlp_parameters(config: ModelConfig, ranks: int, rank: int) -> int:
    hidden = config.hidden
    intermediate = share_size(config.intermediate, rank, ranks)
    gate_up = mlp_inputs(config) * intermediate * (hidden + config.mlp_bias)
    down = hidden * (intermediate + config.mlp_bias)
    return gate_up + down + (XIELU_NUMBERS if config.activation == "xielu" else 0)


def _router_parameters(config: ModelConfig, ranks: int, rank: int) -> int:
    """Return the parameters of a layer's router and shared expert, with all biases of experts."""
    if (experts := config.experts) is None:
        return 0
    per_expert = config.hidden
    if experts.has_biases:  # router, gate and up, down
        per_expert += 1 + 2 * share_size(experts.intermediate, rank, ranks) + config.hidden
    # Gemma 4's scales, and the norms before and after the experts, and after the MLP
    others = experts.count + 4 * config.hidden if experts.is_gemma4 else 0
    if experts.shared is not None:
        has_gate = experts.names.shared_gate is not None
        matrices = mlp_inputs(config) + 1
        others = config.hidden * (matrices * share_size(experts.shared, rank, ranks) + has_gate)
    return experts.count * (per_expert + experts.gating.is_corrected) + others


def float32_parameters(config: ModelConfig, ranks: int, rank: int) -> int:
    """Return the parameters of routers and of states' decays on a rank that are in float32 always.

    Those of norms are not counted.
    """
    count = 0
    if config.recurrent is not None:
        own = rank_shape(config.recurrent, rank, ranks)
        count += len(own.layers) * own.value_heads * (3 if own.is_mamba else 2)
    if config.experts is not None and config.experts.gating.in_float32:
        per_expert = config.hidden + config.experts.gating.is_corrected
        count += moe_layers(config) * config.experts.count * per_expert
    return count


def expert_parameters(config: ModelConfig, ranks: int, rank: int) -> int:
    """Return the parameters of the experts of all layers on a rank."""
    if config.experts is None:
        return 0
    columns = share_size(config.experts.intermediate, rank, ranks)
    matrices = mlp_inputs(config) + 1
    return moe_layers(config) * config.experts.count * matrices * columns * config.hidden


def moe_layers(config: ModelConfig) -> int:
    """Return the number of layers with experts."""
    return sum(has_experts(config, layer) for layer in range(config.layers))


def dense_layers(config: ModelConfig) -> int:
    """Return the number of layers with a dense MLP, which may have experts as well."""
    return sum(has_mlp(config, layer) for layer in range(config.layers))


def single_branches(config: ModelConfig) -> int:
    """Return the number of layers with neither an MLP nor experts."""
    return 0 if config.split_layers is None else config.split_layers.mlps.count(None)


def has_mlp(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer has a dense MLP, which may be beside experts."""
    has_both = config.experts is not None and config.experts.is_gemma4
    if config.split_layers is not None and config.split_layers.mlps[layer] is None:
        return False
    return has_both or not has_experts(config, layer)


def has_experts(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer has a mixture of experts, in general instead of a dense MLP."""
    return config.experts is not None and layer in config.experts.layers
