"""A target's multi-token-prediction block, which drafts from the target's own hidden states."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from parallel.config.model_config import ModelConfig
from parallel.formats.checkpoint import Checkpoint
from parallel.formats.weight_headers import PREDICTION
from parallel.model.layers import RowParallelLinear, make_norm
from parallel.model.transformer import DecoderLayer, KVCacheLike, Transformer
from parallel.ranks.process_group import TensorParallelGroup


class PredictionCacheLike(KVCacheLike, Protocol):
    """The interface that a prediction block needs of its cache."""

    def previous_hidden_states(self, rows: int) -> Tensor: ...


class PredictionBlock(Transformer):
    """A decoder layer on a token's embedding and the hidden state of the token before it.

    Its output predicts the hidden state of the token itself, and so the token after it; embedding
    and head are the target's. Source: DeepSeek-AI 2024, DeepSeek-V3 Technical Report, arXiv
    2412.19437, section 2.2, in Qwen's form: hidden states are taken after the final norm, and the
    embedding comes first (vLLM, qwen3_next_mtp.py).
    """

    def __init__(self, config: ModelConfig, group: TensorParallelGroup):
        """Use `predictor_config`; `share` completes the block."""
        Module.__init__(self)
        self.config, self.group = config, group
        self.embedding_norm, self.hidden_norm = make_norm(config), make_norm(config)
        self.fc = RowParallelLinear(group, 2 * config.hidden, config.hidden, bias=False)
        self.layers = ModuleList([DecoderLayer(config, group, 0)])
        self.norm = make_norm(config)

    def share(self, target: Transformer) -> None:
        """Use the embedding and the head of a target, and the memory it unpacks matrices in."""
        self.embed, self.head, self.scratch = target.embed, target.head, target.scratch

    def load(self, checkpoint: Checkpoint) -> None:
        """Fill every parameter from the target's checkpoint. Raises CheckpointError."""
        self.embedding_norm.load(checkpoint, f"{PREDICTION}pre_fc_norm_embedding")
        self.hidden_norm.load(checkpoint, f"{PREDICTION}pre_fc_norm_hidden")
        self.fc.load(checkpoint, f"{PREDICTION}fc")
        self.load_layers(checkpoint)
        self.norm.load(checkpoint, f"{PREDICTION}norm")

    def reserve_scratch(self) -> None:
        super().reserve_scratch()
        self.scratch.reserve("fc", self.fc.weight)

    def _inputs(self, tokens: Tensor, cache: KVCacheLike) -> Tensor:
        """Return a projection (T, hidden) of embeddings and of the states before each token."""
        previous = cast(PredictionCacheLike, cache).previous_hidden_states(len(tokens))
        parts = self.embedding_norm(self._embed(tokens)), self.hidden_norm(previous)
        return self.fc(torch.cat(parts, dim=-1)[:, self.fc.share])()
