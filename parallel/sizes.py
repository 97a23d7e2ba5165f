"""What a rank holds of a model, by its config alone: no model is built, no torch is imported.

The layers of `parallel.layers` allocate by the same rules.
"""

from __future__ import annotations

from typing import Protocol

from offload.layout import ceil_div
from parallel.families import QKNorm

# tokens of the longest pass worth recording as a CUDA graph (`parallel.graphs`): a longest draft at
# the retrieval level, and the two tokens that were pending
MAX_GRAPH_TOKENS = 18


class ModelDimensions(Protocol):
    """The dimensions of a whole model, as `parallel.config.ModelConfig` names them."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def o_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> QKNorm | None: ...


def share(total: int, rank: int, ranks: int) -> slice:
    """Return the part of `total` rows or columns that a rank holds: as even as can be."""
    return slice(total * rank // ranks, total * (rank + 1) // ranks)


def share_size(total: int, rank: int, ranks: int) -> int:
    """Return how many rows or columns that part has; the last rank has no fewer than any other."""
    part = share(total, rank, ranks)
    return part.stop - part.start


def vocab_rows(vocab: int, ranks: int) -> int:
    """Return the rows of an embedding on every rank; the last ranks' are padded."""
    return ceil_div(vocab, ranks)


def parameter_count(config: ModelDimensions, ranks: int, rank: int | None = None) -> int:
    """Return the number of parameters on one of `ranks` ranks.

    Without `rank` it is the last one's, which holds no fewer than any other.
    """
    rank = ranks - 1 if rank is None else rank
    embeddings = 1 if config.tied else 2
    return (
        embeddings * vocab_rows(config.vocab, ranks) * config.hidden
        + config.layers * layer_parameter_count(config, ranks, rank)
        + config.hidden  # the last norm
    )


def layer_parameter_count(config: ModelDimensions, ranks: int, rank: int) -> int:
    """Return the number of parameters of one layer on a rank."""
    hidden = config.hidden
    queries = share_size(config.heads * config.head_dim, rank, ranks)
    keys = share_size(config.kv_heads * config.head_dim, rank, ranks)
    intermediate = share_size(config.intermediate, rank, ranks)
    norms = 2 * hidden + {None: 0, "head": 2 * config.head_dim, "width": queries + keys}[
        config.qk_norm
    ]
    qkv = (queries + 2 * keys) * (hidden + config.qkv_bias)
    o = hidden * (queries + config.o_bias)
    gate_up = 2 * intermediate * (hidden + config.mlp_bias)
    down = hidden * (intermediate + config.mlp_bias)
    return norms + qkv + o + gate_up + down
