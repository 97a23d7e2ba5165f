"""How long single passes take on a machine, from its numbers and a model's dimensions alone.

Operations are of all ranks together, bytes of one rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.memory_requirements import Requirements, weight_bytes
from offload.kernels.batch_invariant_shape import KEY_BLOCK, ROW_BLOCK
from offload.layout import ceil_div
from parallel.config.model_config import ModelConfig
from parallel.config.parameter_count import inactive_parameters
from parallel.ranks.partition import vocab_rows

if TYPE_CHECKING:
    import torch


def matmul_flops(config: ModelConfig) -> float:
    """Return the operations of all layers' products a token: two a weight.

    Of a mixture, those are of the experts that a token is given to.
    """
    attention = config.hidden * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    mlps = config.layers * config.intermediate
    if config.experts is not None:
        experts = config.experts
        mixtures = sum(config.has_experts(layer) for layer in range(config.layers))
        mlps += mixtures * (experts.per_token * experts.intermediate - config.intermediate)
    return 2.0 * (config.layers * attention + 3 * config.hidden * mlps)


def head_flops(config: ModelConfig, ranks: int) -> float:
    """Return the operations of one rank for a token's logits."""
    return 2.0 * config.hidden * vocab_rows(config.vocab, ranks)


def attention_flops(config: ModelConfig) -> float:
    """Return the operations of a row's attention a token that it sees, in all layers.

    They are two for QK^T and two for PV, a dimension.
    """
    return 4.0 * config.layers * config.heads * config.head_dim


def prefill_flops(config: ModelConfig, tokens: int) -> tuple[float, float]:
    """Return the operations of a prefill: of products, and of attention over each pair of tokens.

    Of the last layer only keys and values are made.
    """
    whole = (config.layers - 1) / config.layers
    last = 4.0 * config.hidden * config.kv_heads * config.head_dim
    products = (whole * matmul_flops(config) + last) * tokens
    return products, whole * attention_flops(config) * tokens * (tokens + 1) / 2


def read_bytes(config: ModelConfig, ranks: int, dtype: torch.dtype, tokens: int) -> int:
    """Return the bytes of weights that a pass of so many tokens reads: all but the embedding.

    A pass takes a row of it only, unless the embedding is the head too. Nor does it read experts
    that none of its tokens is given to.
    """
    rows = 0 if config.tied else vocab_rows(config.vocab, ranks)
    idle = int(inactive_parameters(config, ranks, tokens)) + rows * config.hidden
    return weight_bytes(config, ranks, dtype) - idle * dtype.itemsize


class ForwardCost:
    """The times of one model's passes on a machine, split over some ranks."""

    def __init__(
        self, hardware: HardwareProfile, config: ModelConfig, ranks: int, dtype: torch.dtype
    ):
        self.hardware, self.config, self.ranks, self.dtype = hardware, config, ranks, dtype

    def seconds(self, rows: int, attended: int, texts: int = 1, read: float = 1.0) -> float:
        """Return the seconds of a short pass, and of drawing from what it says.

        `texts` share it: each of a text's `rows` tokens attends to `attended` tokens of its own,
        and reading a token's KV takes `read` times as long as in 16 bits. That each text's
        attention is a launch more is not counted.
        """
        config, ranks = self.config, self.ranks
        own_rows, rows = rows, texts * rows
        weights = read_bytes(config, ranks, self.dtype, rows)
        kv = read * texts * config.kv_layout(ranks, self.dtype).bytes(attended)
        further = rows * (own_rows - 1) / own_rows
        computed = self._computed_s(rows, attended, weights, kv, further, self.hardware.forward_s)
        return computed + self._sums_s(rows) + self._sampling_s(rows)

    def batch_invariant_seconds(self, rows: int, attended: int) -> float:
        """Return the seconds of such a pass of one text in blocks (`parallel.batch_invariant`).

        A block takes as long as all its rows, also those that only fill it up. So many rows lie in
        so many blocks in the mean, wherever the text stands. Every block of rows is taken to read
        all weights and KV from memory, though some may still be in a cache.
        """
        hardware, config, ranks = self.hardware, self.config, self.ranks
        layout = config.kv_layout(ranks, self.dtype)
        others = read_bytes(config, ranks, self.dtype, 0)
        experts = read_bytes(config, ranks, self.dtype, 1) - others  # read for each row alone
        weights = others + ROW_BLOCK * experts
        pieces = ceil_div(attended, KEY_BLOCK)
        attended = pieces * KEY_BLOCK
        pieces_s = config.layers * layout.heads * pieces * hardware.chunk_s
        kv = layout.bytes(attended)
        block_s = self._computed_s(ROW_BLOCK, attended, weights, kv, ROW_BLOCK - 1, pieces_s)
        blocks = 1 + (rows - 1) / ROW_BLOCK
        computed = blocks * block_s
        # two ranks sum all blocks up at once, for with two there is one order only
        sums = self._sums_s(blocks * ROW_BLOCK) if ranks <= 2 else blocks * self._sums_s(ROW_BLOCK)
        return computed + sums + hardware.forward_s + self._sampling_s(rows)

    def _computed_s(
        self,
        rows: int,
        attended: int,
        weights: float,
        kv: float,
        further: float,
        others_s: float,
    ) -> float:
        """Return the seconds of what one rank computes in a pass.

        Args:
            rows: of the pass.
            attended: tokens that each of them attends to.
            weights: bytes of weights that are read.
            kv: bytes of KV, likewise.
            further: rows whose attention is not hidden behind reading the KV, where that was
                measured with a row.
            others_s: launches beside those of each layer, in seconds.
        """
        hardware, config, ranks = self.hardware, self.config, self.ranks
        memory = weights / hardware.memory_rate + kv / (hardware.kv_rate or hardware.memory_rate)
        products = self._products_s(rows)
        score_s = attention_flops(config) * attended / ranks
        score_s /= hardware.attention or hardware.matmul
        launches = config.layers * hardware.layer_s + others_s
        if hardware.runs_ahead:
            return max(memory, products + rows * score_s, launches)
        return memory + products + further * score_s + launches

    def _sums_s(self, rows: float) -> float:
        """Return the seconds of a pass's sums over ranks."""
        return 2 * self.config.layers * self._all_reduce_s(rows)

    def _sampling_s(self, rows: int) -> float:
        """Return the seconds of drawing from what a pass says."""
        return rows * self.hardware.sample_s + self.hardware.draw_s

    def _products_s(self, rows: int) -> float:
        """Return the seconds of a short pass's products beside those of reading the weights.

        Between passes that were measured, times are interpolated: a processor may take another
        path from some number of rows on.
        """
        hardware, config, ranks = self.hardware, self.config, self.ranks
        if not hardware.extra_query_tokens:
            return rows * matmul_flops(config) / ranks / hardware.matmul
        flops = matmul_flops(config) / ranks + head_flops(config, ranks)
        before, seconds = 1, 0.0
        for measured, rate in hardware.extra_query_tokens:
            there = (measured - 1) * flops / rate
            if rows <= measured:
                return seconds + (there - seconds) * (rows - before) / (measured - before)
            before, seconds = measured, there
        return seconds + (rows - before) * flops / hardware.matmul

    def prefill(self, tokens: int, written: int) -> tuple[float, str]:
        """Return the seconds of a layer-major prefill, and what bounds it: the three overlap.

        `written` is the bytes of a rank's KV that go to the host.
        """
        hardware = self.hardware
        products, scores = prefill_flops(self.config, tokens)
        arithmetic = products / hardware.matmul
        arithmetic += scores / (hardware.prefill_attention or hardware.matmul)
        times = {
            "arithmetic": arithmetic / self.ranks,
            "sums over ranks": 2 * (self.config.layers - 1) * self._all_reduce_s(tokens),
            "write-back": written / hardware.link_out,
        }
        bound = max(times, key=times.__getitem__)
        return times[bound], bound

    def _all_reduce_s(self, rows: float) -> float:
        """Return the seconds of one sum over ranks of the hidden states of `rows` tokens."""
        if self.ranks == 1:
            return 0.0
        nbytes = rows * self.config.hidden * self.dtype.itemsize
        return self.hardware.all_reduce_s + nbytes / self.hardware.all_reduce_rate


def selection_s(hardware: HardwareProfile, kv: float) -> float:
    """Return the seconds of one selection over `kv` bytes of one rank; it reads the keys."""
    return kv / (hardware.score_rate or 2 * hardware.memory_rate)


def target_cost(hardware: HardwareProfile, needs: Requirements) -> ForwardCost:
    """Return the times of the target's passes."""
    return ForwardCost(hardware, needs.target, needs.ranks, needs.dtype)
