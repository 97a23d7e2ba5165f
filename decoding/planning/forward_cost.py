"""Predicted times of single forwards, from hardware numbers and model dimensions alone.

FLOPs are totals over all ranks; bytes are per rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from math import inf
from typing import TYPE_CHECKING

from decoding.config.defaults import MAX_WHOLE_SHARE
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.requirements import weight_bytes
from offload.errors import TierForceError
from offload.kernels.batch_invariant_shape import KEY_BLOCK, ROW_BLOCK
from offload.layout import STATE_CHUNK, KVLayout, ceil_div
from parallel.config.model_config import ModelConfig
from parallel.config.parameter_count import (
    active_share,
    dense_layers,
    has_window,
    head_shape,
    is_recurrent,
    kv_projections,
    latent_weights,
    mlp_inputs,
    moe_layers,
    query_projections,
    recurrent_layers,
    recurrent_rows,
    single_branches,
    windowed_layers,
)
from parallel.config.weight_sizes import weight_sizes
from parallel.formats.plane_format import PlaneFormat
from parallel.formats.weight_headers import PREDICTION
from parallel.ranks.partition import LARGE_SUM_BYTES, vocab_rows

if TYPE_CHECKING:
    import torch


# bytes that plain operations on a GPU read and write to unpack a weight: some ten tensors, most of
# them in float32
_PLAIN_BYTES = 40
_REMEMBERED = 4096  # predictions of a model's forwards


@cache
def matmul_flops(config: ModelConfig) -> float:
    """Return the matmul FLOPs of all layers per token: two per weight.

    A mixture of experts counts only the experts that a token is routed to.
    """
    attention = config.full_layers * _projections(config, windowed=False)
    attention += windowed_layers(config) * _projections(config, windowed=True)
    attention += recurrent_layers(config) * _recurrent_weights(config)
    mlps = dense_layers(config) * config.intermediate * (mlp_inputs(config) + 1)
    if (experts := config.experts) is not None:
        shared = experts.shared or 0
        own = experts.per_token * experts.intermediate + shared
        mlps += moe_layers(config) * own * (mlp_inputs(config) + 1)
    inputs = 2 * config.hidden**2 if config.is_predictor else 0
    return 2.0 * (attention + config.hidden * mlps + inputs)


def _projections(config: ModelConfig, windowed: bool) -> int:
    """Return the weights of a layer's attention."""
    if config.latent is not None:
        return latent_weights(config.latent, config.hidden, config.heads)
    shape = head_shape(config, windowed)
    queries = query_projections(config) + 1  # and the output's
    per_head = queries * shape.groups + kv_projections(config, windowed)
    return config.hidden * shape.dim * shape.heads * per_head


def _recurrent_weights(config: ModelConfig) -> int:
    """Return the weights of the projections of a recurrent layer."""
    if (shape := config.recurrent) is None:
        return 0
    return config.hidden * (recurrent_rows(shape) + shape.value_heads * shape.value_dim)


def recurrence_flops(config: ModelConfig) -> float:
    """Return the FLOPs of all recurrent layers per token of a prompt, beside their projections.

    Each head's state is read for the token's value and for its output, and corrected; in its chunk
    the token has scores with all others, which are solved for values and keys, and weigh the values
    again. Mamba-2 does not read the state for the value, and has nothing to solve. They are in
    float32, in which GPUs like the RTX 4090 compute half as fast.
    """
    if (shape := config.recurrent) is None:
        return 0.0
    keys, values = shape.key_dim, shape.value_dim
    states = (2 if shape.is_mamba else 3) * keys * values
    chunk = STATE_CHUNK * (keys + values if shape.is_mamba else 3 * keys + 2 * values)
    return 2 * 2.0 * len(shape.layers) * shape.value_heads * (states + chunk)


def head_flops(config: ModelConfig, ranks: int) -> float:
    """Return one rank's FLOPs for a token's logits."""
    return 2.0 * config.hidden * vocab_rows(config.vocab, ranks)


def attention_flops(config: ModelConfig, attended: float) -> float:
    """Return the attention FLOPs of all layers for a query token that sees `attended` tokens.

    In layers with a window it sees no more than that.
    """
    return _attention_flops(config, attended, min(attended, _window(config)))


def prefill_flops(config: ModelConfig, tokens: int, chunks: int = 1) -> tuple[float, float]:
    """Return the FLOPs of a prefill: matmuls, and attention over each pair of tokens.

    The last layer computes only keys and values. Heads that attend to latents through keys and
    values of their own compute those of all tokens up to a chunk's end for each of the `chunks`.
    """
    other_layers = (config.layers - 1) / config.layers
    is_windowed = has_window(config, config.layers - 1)
    last, projections = head_shape(config, is_windowed), kv_projections(config, is_windowed)
    last_layer = 2.0 * projections * config.hidden * last.heads * last.dim
    if is_recurrent(config, config.layers - 1):
        last_layer = 2.0 * _recurrent_weights(config)
    matmul = (other_layers * matmul_flops(config) + last_layer + recurrence_flops(config)) * tokens
    first = min(tokens, _window(config))  # tokens that see all before them
    windowed = first * (first + 1) / 2 + (tokens - first) * first
    scores = other_layers * _attention_flops(config, tokens * (tokens + 1) / 2, windowed)
    if (shape := config.latent) is not None and shape.has_own_kv(ceil_div(tokens, chunks)):
        expanded = tokens * (chunks + 1) / 2
        # queries and outputs of each token are not projected instead
        per_token = 2.0 * config.heads * shape.rank * (shape.plain_dim + shape.value_dim)
        matmul += (config.layers - 1) * per_token * (expanded - tokens)
        scores *= shape.own_dim / shape.head_dim
    return matmul, scores


def _attention_flops(config: ModelConfig, full: float, windowed: float) -> float:
    """Return the attention FLOPs of these numbers of pairs of tokens in each kind of layer.

    Two for QK^T and two for PV per dimension.
    """
    pairs = 0.0
    kinds = ((False, config.full_layers, full), (True, windowed_layers(config), windowed))
    for is_windowed, layers, seen in kinds:
        shape = head_shape(config, is_windowed)
        pairs += layers * seen * shape.dim * shape.heads * shape.groups
    return 4.0 * pairs


def _state_bytes(layout: KVLayout) -> int:
    """Return the bytes of recurrent states that a forward reads and writes.

    It reads and writes them to advance past the tokens before it, and reads them for its own.
    """
    states = layout.recurrent
    return 0 if states is None else 3 * states.cache_bytes(0, layout.dtype.itemsize)


def _window(config: ModelConfig) -> float:
    return inf if config.sliding_window is None else config.sliding_window.tokens


def read_bytes(config: ModelConfig, ranks: int, dtype: torch.dtype, active: float) -> float:
    """Return the bytes of weights that a forward reads.

    Excludes the embedding unless it is tied to the head. `active` is the share of the experts that
    it reads (`active_share`), above 1 if it reads them repeatedly.
    """
    sizes = weight_sizes(config, ranks, dtype.itemsize)
    return sizes.nbytes + sizes.shared - sizes.embedding - (1 - active) * sizes.experts


def choose_weights(
    config: ModelConfig,
    setting: str,
    hardware: HardwareProfile,
    dtype: torch.dtype,
    device_memory: float,
    target: ModelConfig | None = None,
) -> ModelConfig:
    """Return the config with the matrices that stay packed: all that can, or none.

    By default they do where that is faster, or where 16 bits would take most of the memory.

    Args:
        config: the model's, with what can stay packed.
        setting: auto, packed or 16-bit.
        hardware: the profile of this machine; its number of GPUs shares the model.
        dtype: of weights that are not packed.
        device_memory: bytes for weights and KV on one rank.
        target: if the model is its draft, which is assumed to be on one rank: the target, as it
            was chosen.

    Raises TierForceError if a target has nothing to pack where `setting` demands it.
    """
    if setting == "packed" and not config.kept_types and target is None:
        raise TierForceError(
            "`weights` packed: the model has no quantised matrices that can stay packed: leave it "
            "out."
        )
    whole = replace(config, kept_types=())
    if setting != "auto" or not config.kept_types:
        return whole if setting == "16-bit" else config
    is_faster = (
        hardware.runs_ahead
        and dtype.itemsize == 2  # kernels are for 16 bits, and for planes
        and all(
            isinstance(kind, PlaneFormat)
            for name, kind in config.kept_types
            if not name.startswith(PREDICTION)
        )
        and hardware.packed_rate is not None
        and hardware.packed_rate * dtype.itemsize > hardware.memory_rate
    )
    ranks, memory = hardware.gpus, device_memory
    if target is not None:
        ranks, memory = 1, memory - weight_bytes(target, hardware.gpus, dtype)
    is_large = weight_bytes(whole, ranks, dtype) > MAX_WHOLE_SHARE * memory
    return config if is_faster or is_large else whole


@lru_cache(maxsize=16)
def forward_cost(
    hardware: HardwareProfile, config: ModelConfig, ranks: int, dtype: torch.dtype
) -> ForwardCost:
    """Return the costs of a model's forwards: the same object for the same arguments."""
    return ForwardCost(hardware, config, ranks, dtype)


class ForwardCost:
    """The predicted times of one model's forwards, with tensor parallelism over `ranks`."""

    def __init__(
        self, hardware: HardwareProfile, config: ModelConfig, ranks: int, dtype: torch.dtype
    ):
        self.hardware, self.config, self.ranks, self.dtype = hardware, config, ranks, dtype
        # keys that are values as well are read twice
        self._layout = config.kv_layout(ranks, dtype).in_pairs
        # plans for several budgets ask for the same forwards
        self._remembered = lru_cache(_REMEMBERED)(self._seconds)

    def seconds(
        self,
        query_tokens: int,
        attended: int,
        concurrency: int = 1,
        kv_scale: float = 1.0,
        captured: bool = False,
    ) -> float:
        """Return the seconds of a short forward and of sampling from its logits.

        Args:
            query_tokens: per request.
            attended: tokens of its own request that each query token attends to.
            concurrency: batched requests. The extra attention launches are not counted.
            kv_scale: the time to read a token's KV in layers with full attention, relative to 16
                bits.
            captured: whether it is a CUDA graph, on a GPU.
        """
        return self._remembered(query_tokens, attended, concurrency, kv_scale, captured)

    def _seconds(
        self, query_tokens: int, attended: int, concurrency: int, kv_scale: float, captured: bool
    ) -> float:
        """Return `seconds`."""
        config = self.config
        tokens = concurrency * query_tokens
        weights_s = self._read_s(active_share(config, tokens))
        layout = self._layout
        states = _state_bytes(layout)
        scaled = (kv_scale - 1) * layout.bytes(attended, layout.full_layers)
        kv = concurrency * (layout.bytes(attended) + scaled + states)
        extra = tokens * (query_tokens - 1) / query_tokens
        compute_s = self._compute_s(tokens, attended, weights_s, kv, extra, self.hardware.forward_s)
        if not captured:
            compute_s = max(compute_s, self._launches_s + self.hardware.forward_s)
        return compute_s + self._all_reduces_s(tokens, not captured) + self._sampling_s(tokens)

    @property
    def _launches_s(self) -> float:
        """The seconds in which the host launches the layers of a forward that is not captured."""
        return self.config.layers * (self.hardware.eager_layer_s or 0.0)

    def batch_invariant_seconds(self, query_tokens: int, attended: int) -> float:
        """Return the seconds of a batch-invariant forward of one request, computed in row blocks.

        See `parallel.batch_invariant`. A padded block costs as much as a full one. The number of
        blocks is the mean over all alignments of the query tokens. Every block is assumed to read
        all weights and KV from memory, though some may still be in a processor cache.
        """
        hardware, config, ranks = self.hardware, self.config, self.ranks
        layout = self._layout
        weights_s = self._read_s(ROW_BLOCK * active_share(config, 1))  # read separately per token
        key_blocks = ceil_div(attended, KEY_BLOCK)
        attended = key_blocks * KEY_BLOCK
        # layers with a window have one block of keys for all heads
        chunks = config.full_layers * layout.heads * key_blocks
        key_blocks_s = (chunks + windowed_layers(config)) * hardware.chunk_s
        kv = layout.bytes(attended) + _state_bytes(layout)
        block_s = self._compute_s(ROW_BLOCK, attended, weights_s, kv, ROW_BLOCK - 1, key_blocks_s)
        blocks = 1 + (query_tokens - 1) / ROW_BLOCK
        compute_s = max(blocks * block_s, self._launches_s)
        # With two ranks the order of summation is unique, so all blocks share one all-reduce.
        if ranks <= 2:
            all_reduces_s = self._all_reduces_s(blocks * ROW_BLOCK)
        else:
            all_reduces_s = blocks * self._all_reduces_s(ROW_BLOCK)
        return compute_s + all_reduces_s + hardware.forward_s + self._sampling_s(query_tokens)

    def _compute_s(
        self,
        query_tokens: int,
        attended: int,
        weights_s: float,
        kv: float,
        extra: float,
        overhead_s: float,
    ) -> float:
        """Return the seconds of one rank's compute in a forward.

        Args:
            query_tokens: of all requests.
            attended: tokens that each query token attends to.
            weights_s: seconds of reading weights.
            kv: bytes of KV read.
            extra: query tokens whose attention the KV rate, measured with one query token per
                request, does not include.
            overhead_s: seconds beside those of the layers.
        """
        hardware, config, ranks = self.hardware, self.config, self.ranks
        memory = weights_s + kv / (hardware.kv_rate or hardware.memory_rate)
        matmul_s = self._matmul_s(query_tokens)
        score_s = attention_flops(config, attended) / ranks
        score_s /= hardware.attention or hardware.matmul
        small_s = config.layers * hardware.layer_s + overhead_s  # small kernels, one after another
        if hardware.runs_ahead:
            return max(memory, matmul_s + query_tokens * score_s) + small_s
        return memory + matmul_s + extra * score_s + small_s

    def _read_s(self, active: float) -> float:
        """Return the seconds of reading the weights of a forward, and of unpacking them.

        `active` as in `read_bytes`. On a GPU kernels unpack what they read. Where there are none,
        plain operations move some bytes for each weight, or on a CPU unpack at its rate, and 16
        bits are read again.
        """
        hardware, itemsize = self.hardware, self.dtype.itemsize
        sizes = weight_sizes(self.config, self.ranks, itemsize)
        read_s = read_bytes(self.config, self.ranks, self.dtype, active) / hardware.memory_rate
        if not sizes.kept:
            return read_s
        kept = sizes.kept - (1 - active) * sizes.kept_experts
        packed_rate = hardware.packed_rate or hardware.memory_rate / itemsize
        if not hardware.runs_ahead:
            return read_s + kept * (1 / packed_rate + itemsize / hardware.memory_rate)
        plain = sizes.kept_plain if itemsize == 2 else kept
        fused_s = (kept - plain) / packed_rate
        return max(read_s, fused_s) + plain * _PLAIN_BYTES / hardware.memory_rate

    def _all_reduces_s(self, query_tokens: float, may_share: bool = True) -> float:
        """Return the seconds of a forward's all-reduces."""
        return self._all_reduces * self._all_reduce_s(query_tokens, may_share=may_share)

    def _sampling_s(self, query_tokens: int) -> float:
        """Return the seconds of sampling from a forward's logits."""
        return query_tokens * self.hardware.sample_s + self.hardware.draw_s

    def _matmul_s(self, query_tokens: int) -> float:
        """Return the seconds of a short forward's matmuls in addition to reading the weights.

        Times are interpolated between measured numbers of query tokens, since a processor may
        switch algorithms at some number of rows.
        """
        hardware, config, ranks = self.hardware, self.config, self.ranks
        if not hardware.extra_query_tokens:
            return query_tokens * matmul_flops(config) / ranks / hardware.matmul
        flops = matmul_flops(config) / ranks + head_flops(config, ranks)
        previous, seconds = 1, 0.0
        for measured, rate in hardware.extra_query_tokens:
            measured_s = (measured - 1) * flops / rate
            if query_tokens <= measured:
                step_s = measured_s - seconds
                return seconds + step_s * (query_tokens - previous) / (measured - previous)
            previous, seconds = measured, measured_s
        return seconds + (query_tokens - previous) * flops / hardware.matmul

    def prefill(
        self, tokens: int, written: int, chunks: int = 1, batch_invariant: bool = False
    ) -> tuple[float, str]:
        """Return the seconds of a layer-major prefill, and its bound.

        Arithmetic, all-reduces and write-back overlap. Packed experts are unpacked for each chunk.

        Args:
            tokens: of the prompt.
            written: bytes of KV that one rank copies to the host.
            chunks: in which a layer is computed.
            batch_invariant: whether matrix products and all-reduces are.
        """
        hardware = self.hardware
        matmul, scores = prefill_flops(self.config, tokens, chunks)
        arithmetic = matmul / hardware.matmul
        arithmetic += scores / (hardware.prefill_attention or hardware.matmul)
        may_share = self.ranks == 2 or not batch_invariant
        all_reduce_s = self._all_reduce_s(tokens, chunks, may_share)
        times = {
            "arithmetic": arithmetic / self.ranks + chunks * self._unpack_experts_s(),
            "all-reduce": (self._all_reduces - 2) * all_reduce_s,
            "write-back": written / hardware.link_out,
        }
        bound = max(times, key=times.__getitem__)
        return times[bound], bound

    def _unpack_experts_s(self) -> float:
        """Return the seconds of unpacking all experts once, and of reading them in 16 bits."""
        hardware, itemsize = self.hardware, self.dtype.itemsize
        sizes = weight_sizes(self.config, self.ranks, itemsize)
        if not sizes.kept_experts:
            return 0.0
        packed_bytes = sizes.experts - sizes.whole_experts * itemsize
        seconds = (packed_bytes + 2 * itemsize * sizes.kept_experts) / hardware.memory_rate
        if not hardware.runs_ahead:
            seconds += sizes.kept_experts / (hardware.packed_rate or hardware.memory_rate)
        return seconds

    @property
    def _all_reduces(self) -> int:
        """The all-reduces of a forward: one of each layer's mixer, and one of its MLP.

        Norms over all heads of all ranks have one more.
        """
        config, states = self.config, self.config.recurrent
        norms = config.layers if config.qk_norm == "width" else 0
        if states is not None and states.is_mamba and states.key_heads == 1:
            norms += len(states.layers)
        return 2 * config.layers - single_branches(config) + norms

    def _all_reduce_s(self, tokens: float, chunks: int = 1, may_share: bool = True) -> float:
        """Return the seconds of all-reducing the hidden states of `tokens` tokens, in chunks.

        Large ones go through shared memory, if they may and it is faster.
        """
        if self.ranks == 1:
            return 0.0
        hardware = self.hardware
        nbytes = tokens * self.config.hidden * self.dtype.itemsize
        rate = hardware.all_reduce_rate
        if may_share and nbytes / chunks >= LARGE_SUM_BYTES:
            rate = max(rate, hardware.shared_all_reduce_rate or 0.0)
        return hardware.all_reduce_s + nbytes / rate


def selection_s(hardware: HardwareProfile, kv: float) -> float:
    """Return the seconds of one selection over `kv` bytes of one rank, which reads the keys."""
    return kv / (hardware.score_rate or 2 * hardware.memory_rate)
