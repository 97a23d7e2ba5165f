"""The rates of the kernels that a model's passes are made of, measured on this device.

The runs are small: `decoding.planning.forward_cost` tells from them what large ones take.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from decoding.config.defaults import DEFAULT_RETRIEVAL_BUDGET
from decoding.config.settings import Settings
from decoding.engine.session import SequenceState
from decoding.models.runtime import Runtime
from decoding.planning.forward_cost import attention_flops, head_flops, matmul_flops, prefill_flops
from decoding.probe.rates import RUNS, median_seconds, random_tensor, time_once
from decoding.probe.split_rates import split_rates
from decoding.speculation.rejection_sampler import Draft, rejection_sample
from decoding.speculation.sampling import Sampling
from offload.attention import partial_attention
from offload.cache.streaming import StreamingCache
from offload.cache.streaming_shape import StreamingCacheSpec
from offload.kernels.batch_invariant_attention import batch_invariant_attention
from offload.kernels.batch_invariant_shape import KEY_BLOCK, ROW_BLOCK
from offload.kernels.selection import batch_invariant_kernels
from offload.retrieval.cache import RetrievalCache
from offload.retrieval.selection import POLICIES
from offload.retrieval.shape import RetrievalCacheSpec
from offload.traffic import ByteCounters
from parallel.config.model_config import ModelConfig
from parallel.execution.cuda_graphs import GraphRunner, cuda_graphs_supported
from parallel.model.loading import random_model
from parallel.ranks.process_group import TensorParallelGroup

# tokens of a pass over the retrieval cache, of a verification, and of a chunk of prefill
_RETRIEVAL_ROWS = 3
_VERIFIED_ROWS = 33
_PREFILL_ROWS = 4096
_KV_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}  # far more than any processor cache holds
_PREFILL_S = 0.5  # of a prefill's run: a slow device reads a shorter prompt
_PREFIX = 32_768  # tokens that a selection looks through, at most
_STEADY_BLOCKS = 8  # of keys, that steady attention goes through
_LARGE_BUDGET = 16_384  # of a retrieval cache that is timed beside one of the usual budget
_SAMPLING = Sampling(0.6, top_p=0.9)
_SHORT_PASSES = 60  # repeats of a pass of one row, which takes little
_SHORT_LAYERS = 5  # of a model that is timed beside one of a single layer
_SHORT_TEXT = 1024  # tokens: with few of them attention takes a way of its own
_LARGE = {"hidden_size": 4096, "intermediate_size": 11_008, "num_attention_heads": 32}
_SMALL = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8}


def usual_dimensions(device: torch.device) -> ModelConfig:
    """Return the dimensions that rates are measured with where no model is named.

    They are those of a 7B, or on a CPU of a smaller model.
    """
    sizes: dict[str, Any] = _SMALL if device.type == "cpu" else _LARGE
    config = LlamaConfig(
        **sizes,
        vocab_size=32_000,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        max_position_embeddings=1 << 17,
    )
    return ModelConfig.from_hf(config)


def pass_rates(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measure the numbers of a hardware profile that depend on kernels.

    They are of layers of this model, on one rank that has them whole.
    """
    return _Kernels(config, device, dtype).rates() | split_rates(config, device, dtype)


class _Kernels:
    """The kernels of a model's layers on one device."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype):
        self.config, self.device, self.dtype = config, device, dtype
        self.layer = replace(config, layers=1)
        self.layout = self.layer.kv_layout(1, dtype)

    def rates(self) -> dict[str, float]:
        """Measure all of them, by the fields of a hardware profile."""
        rates = {"memory_rate": self.memory_rate(), **self.attention_rates()}
        rates["chunk_s"] = self.chunk_seconds(rates)
        rates["matmul"] = self.matmul_rate(rates["prefill_attention"])
        rates |= self.retrieval_rates()
        rates |= self.launch_seconds(rates["memory_rate"], rates["kv_rate"])
        if self.device.type == "cpu":  # elsewhere further rows hide behind reading the weights
            rates |= self.extra_query_tokens()
        return rates | sampling_seconds(self.config.vocab, self.device)

    def memory_rate(self) -> float:
        """Measure the bytes of weights a second that a product with one row reads."""
        columns, rows = (4096, 1 << 15) if self.device.type == "cpu" else (8192, 1 << 16)
        weight = torch.ones(rows, columns, device=self.device, dtype=self.dtype)
        x = torch.ones(1, columns, device=self.device, dtype=self.dtype)
        return weight.nbytes / median_seconds(lambda: F.linear(x, weight))

    def launch_seconds(self, memory_rate: float, kv_rate: float) -> dict[str, float]:
        """Measure what a layer and a pass take on top of reading their weights and KV."""
        layer_s, head_s = self._short_pass_s(1, _SHORT_TEXT)
        weights = matmul_flops(self.layer) / 2 * self.dtype.itemsize
        head = head_flops(self.config, 1) / 2 * self.dtype.itemsize
        kv = self.layout.bytes(_SHORT_TEXT)
        return {
            "layer_s": max(0.0, layer_s - weights / memory_rate - kv / kv_rate),
            "forward_s": max(0.0, head_s - head / memory_rate),
        }

    def extra_query_tokens(self) -> dict[str, float]:
        """Measure the operations a second of the rows beyond the first, in passes of some rows."""
        one, _ = self._short_pass_s(1)
        rates = {}
        for rows in (3, 5, _VERIFIED_ROWS):
            layer_s, _ = self._short_pass_s(rows)
            further = (rows - 1) * matmul_flops(self.layer)
            if layer_s > one:
                rates[f"matmul_{rows}"] = further / (layer_s - one)
        return rates

    def _short_pass_s(self, rows: int, behind: int = 1) -> tuple[float, float]:
        """Measure a pass behind so many tokens: what each layer takes, and all else of it."""
        few = self._model_s(1, rows, behind)
        layer_s = (self._model_s(_SHORT_LAYERS, rows, behind) - few) / (_SHORT_LAYERS - 1)
        return layer_s, few - layer_s

    def _model_s(self, layers: int, rows: int, behind: int) -> float:
        """Measure a pass of a model of so many layers."""
        config, device = replace(self.config, layers=layers), self.device
        rotary = config.rotary(1, behind + 2 * _VERIFIED_ROWS, self.dtype, device)
        shape = StreamingCacheSpec(1, behind, _VERIFIED_ROWS)
        cache = StreamingCache(config.kv_layout(1, self.dtype), shape, rotary, device)
        group = TensorParallelGroup(device=device)
        model = random_model(config, group, self.dtype)
        for part in torch.zeros(behind, dtype=torch.int64, device=device).split(_VERIFIED_ROWS):
            model(part, cache, 1)
            cache.advance(len(part))
        tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        run = GraphRunner(cuda_graphs_supported(group), group.graph_capturer)
        run.warm_up(model, tokens, cache, rows)
        # read before each pass, so that weights come from memory, as they do behind a text
        others = torch.ones(_KV_BYTES[device.type] // 4, device=device)
        repeats = max(RUNS, _SHORT_PASSES // rows)
        return median_seconds(
            lambda: run(model, tokens, cache, rows), repeats, lambda: others.sum()
        )

    def attention_rates(self) -> dict[str, float]:
        """Measure attention: of one row, of further rows of a short pass, and of a prefill."""
        layout, flops = self.layout, attention_flops(self.layer)
        room = _KV_BYTES[self.device.type] // layout.bytes(1)
        tokens = max(2 * _PREFILL_ROWS, min(1 << 17, room))
        # (2, N, Hkv, D)
        kv = self._random(layout.shape(1, tokens))[0].transpose(1, 2)
        one = self._attention_s(kv, 1, causal=False)
        several = self._attention_s(kv, _VERIFIED_ROWS, causal=False)
        keys = min(tokens, 4 * _PREFILL_ROWS)
        many = self._attention_s(kv[:, :keys], _PREFILL_ROWS, causal=True, of=min)
        pairs = _PREFILL_ROWS * (keys - _PREFILL_ROWS / 2)
        rates = {"kv_rate": layout.bytes(tokens) / one, "prefill_attention": pairs * flops / many}
        # else a device does so many rows in the shadow of reading, and no number says how fast
        if several > one:
            rates["attention"] = (_VERIFIED_ROWS - 1) * tokens * flops / (several - one)
        return rates

    def _attention_s(
        self,
        kv: Tensor,
        rows: int,
        causal: bool,
        of: Callable[[list[float]], float] = statistics.median,
    ) -> float:
        """Measure the attention of `rows` rows over kv (2, N, Hkv, D)."""
        q = self._random((rows, self.layer.heads, self.layer.head_dim))
        return median_seconds(lambda: partial_attention(q, kv[0], kv[1], causal)[0], of=of)

    def chunk_seconds(self, rates: Mapping[str, float]) -> float:
        """Measure what a block of keys takes beside what these rates tell, where rows are steady.

        It is nothing where fused kernels take all of a layer's at once. On a GPU without them all
        of it is launches.
        """
        layout, tokens = self.layout, _STEADY_BLOCKS * KEY_BLOCK
        groups = self.layer.heads // self.layer.kv_heads
        if (
            batch_invariant_kernels(self.device.type, self.dtype, layout.head_dim, groups)[0]
            is not None
        ):
            return 0.0
        kv = self._random(layout.shape(1, tokens))[0]
        q = self._random((ROW_BLOCK, self.layer.heads, self.layer.head_dim))
        traffic = ByteCounters()
        seconds = median_seconds(lambda: batch_invariant_attention(q, [kv], traffic))
        if self.device.type == "cpu":
            seconds -= layout.bytes(tokens) / rates["kv_rate"]
            scores = (ROW_BLOCK - 1) * attention_flops(self.layer) * tokens
            seconds -= scores / rates["attention"] if "attention" in rates else 0.0
        return max(0.0, seconds) / (_STEADY_BLOCKS * layout.heads)

    def matmul_rate(self, attention: float) -> float:
        """Measure the operations a second of all that a prefill does beside attention.

        It is of two layers: of the last one little is computed.
        """
        config = replace(self.config, layers=2)
        link = "view" if self.device.type == "cpu" else "auto"
        settings = Settings(mode="plain", gpu_kv_layers=2, link=link)
        model = random_model(config, TensorParallelGroup(device=self.device), self.dtype)
        runtime = Runtime.create(model, None, "plain", settings)
        tokens, chunk = 256, runtime.requirements.prefill_chunk

        def prefill() -> Tensor:
            return SequenceState(runtime, [0] * tokens, 1).prefill()

        try:
            prefill()  # which makes kernels
            while tokens < chunk and 2 * time_once(prefill) < _PREFILL_S:
                tokens = min(2 * tokens, chunk)
            seconds = median_seconds(prefill, of=min)
        finally:
            runtime.link.close()
        products, scores = prefill_flops(config, tokens)
        return products / max(seconds - scores / attention, 0.1 * seconds)

    def retrieval_rates(self) -> dict[str, float]:
        """Measure selecting, and attention of one row to what is selected and kept in 8 bits.

        What takes as long for few tokens as for many is no part of the second.
        """
        few, select_s = self._retrieval(DEFAULT_RETRIEVAL_BUDGET)
        rates = {"score_rate": self.layout.bytes(_PREFIX) / select_s}
        if self.dtype.itemsize == 2:
            many, _ = self._retrieval(_LARGE_BUDGET)
            # read before each pass, so that the cache comes from memory
            others = torch.ones(_KV_BYTES[self.device.type] // 4, device=self.device)
            few_s, many_s = (
                median_seconds(each, before=lambda: others.sum()) for each in (few, many)
            )
            if many_s > few_s:
                kv = self.layout.bytes(_LARGE_BUDGET - DEFAULT_RETRIEVAL_BUDGET)
                rates["int8_rate"] = kv / (many_s - few_s)
        return rates

    def _retrieval(self, budget: int) -> tuple[Callable[[], Tensor], float]:
        """Return what attends to a retrieval cache, and the seconds of a selection for it."""
        layout, usual, rows = self.layout, Settings(), _VERIFIED_ROWS
        rotary = self.layer.rotary(1, _PREFIX + 2 * rows, self.dtype, self.device)
        shape = RetrievalCacheSpec.of(budget, usual.chunk_size, _PREFIX + rows, rows, rows)
        shape = replace(shape, quantised=self.dtype.itemsize == 2)
        policy = POLICIES[usual.policy]()
        cache = RetrievalCache(layout, shape, policy, rotary, self.device, min_interval=0)
        prefix = self._random(layout.shape(1, _PREFIX))[0]
        recent = self._random(layout.shape(1, rows))[0]
        q = self._random((rows, self.layer.heads, self.layer.head_dim))
        keys, values = recent.transpose(1, 2)[:, :1]  # of one token (1, Hkv, D)

        def choose() -> Tensor:
            cache.on_forward(_PREFIX, _PREFIX, _PREFIX + rows)
            cache.on_attention(0, 0, q, prefix, recent)
            return cache.buffers(0)[0]

        return lambda: cache.attend(0, q[:1], keys, values, _PREFIX), median_seconds(choose)

    def _random(self, shape: Sequence[int]) -> Tensor:
        return random_tensor(*shape, device=self.device, dtype=self.dtype)


def sampling_seconds(vocab: int, device: torch.device) -> dict[str, float]:
    """Measure computing the distribution of a row of logits, and sampling from distributions."""
    few, many = (_verdict_s(vocab, device, rows) for rows in (_RETRIEVAL_ROWS, _VERIFIED_ROWS))
    row = max(0.0, many - few) / (_VERIFIED_ROWS - _RETRIEVAL_ROWS)
    return {"sample_s": row, "draw_s": max(0.0, few - _RETRIEVAL_ROWS * row)}


def _verdict_s(vocab: int, device: torch.device, rows: int) -> float:
    """Measure the distributions of `rows` rows, and verifying a draft one token shorter."""
    generator = torch.Generator(device)
    logits = random_tensor(rows, vocab, device=device)
    draft = Draft(
        torch.zeros(rows - 1, dtype=torch.int64, device=device),
        torch.ones(rows - 1, vocab, device=device) / vocab,
    )
    return median_seconds(
        lambda: torch.tensor(rejection_sample(draft, _SAMPLING.probs(logits), generator))
    )
