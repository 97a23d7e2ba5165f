"""What a rank holds of a model, by its config alone: no model is built, no torch is imported.

The layers of `parallel.model.layers` allocate by the same rules.
"""

from __future__ import annotations

from parallel.config.model_config import ModelConfig
from parallel.ranks.partition import share_size, vocab_rows

# tokens of the longest pass worth recording as a CUDA graph: a longest draft at the retrieval
# level, and the two tokens that were pending
MAX_GRAPH_TOKENS = 18
# tokens of the longest pass in which a GPU mixes experts in fixed shapes, so that the host does not
# wait to know the choice: more than a verification's, which reads most experts anyway. What texts
# share is recorded up to as many, of any model: of more the launches hide behind the arithmetic
MAX_STATIC_TOKENS = 64


def head_rows(config: ModelConfig) -> tuple[int, int]:
    """Return the rows that one KV head has of queries, with all that share it, and of keys."""
    return config.heads // config.kv_heads * config.head_dim, config.head_dim


def parameter_count(config: ModelConfig, ranks: int, rank: int | None = None) -> int:
    """Return the number of parameters on one of `ranks` ranks.

    Without `rank` it is the last one's, which holds no fewer than any other.
    """
    rank = ranks - 1 if rank is None else rank
    embeddings = 1 if config.tied else 2
    mixtures = sum(config.has_experts(layer) for layer in range(config.layers))
    mlps = config.layers - mixtures
    return (
        embeddings * vocab_rows(config.vocab, ranks) * config.hidden
        + config.layers * _attention_parameters(config, ranks, rank)
        + mlps * _mlp_parameters(config, ranks, rank)
        + mixtures * (_router_parameters(config) + _expert_parameters(config, ranks, rank))
        + config.hidden  # the last norm
    )


def inactive_parameters(config: ModelConfig, ranks: int, tokens: int) -> float:
    """Return the parameters on the last rank that a pass of so many tokens does not use.

    They are those of experts that no token is given to, if every token chooses any as likely.
    """
    if config.experts is None:
        return 0.0
    idle = (1 - config.experts.per_token / config.experts.count) ** tokens
    mixtures = sum(config.has_experts(layer) for layer in range(config.layers))
    return mixtures * _expert_parameters(config, ranks, ranks - 1) * idle


def _attention_parameters(config: ModelConfig, ranks: int, rank: int) -> int:
    """Return the parameters of a layer on a rank, less those of its MLP. Both norms are here."""
    hidden = config.hidden
    heads = share_size(config.kv_heads, rank, ranks)
    queries, keys = (heads * rows for rows in head_rows(config))
    norms = (
        2 * hidden + {None: 0, "head": 2 * config.head_dim, "width": queries + keys}[config.qk_norm]
    )
    qkv = (queries + 2 * keys) * (hidden + config.qkv_bias)
    o = hidden * (queries + config.o_bias)
    return norms + qkv + o


def _mlp_parameters(config: ModelConfig, ranks: int, rank: int) -> int:
    hidden = config.hidden
    intermediate = share_size(config.intermediate, rank, ranks)
    gate_up = 2 * intermediate * (hidden + config.mlp_bias)
    down = hidden * (intermediate + config.mlp_bias)
    return gate_up + down


def _router_parameters(config: ModelConfig) -> int:
    return 0 if config.experts is None else config.experts.count * config.hidden


def _expert_parameters(config: ModelConfig, ranks: int, rank: int) -> int:
    """Return the parameters of all of a layer's experts on a rank."""
    if config.experts is None:
        return 0
    columns = share_size(config.experts.intermediate, rank, ranks)
    return config.experts.count * 3 * columns * config.hidden
