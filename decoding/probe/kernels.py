"""Microbenchmarks of the kernels of a model's forward on this device.

The runs are small; `decoding.planning.forward_cost` extrapolates from them.
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
from decoding.planning.activations import prefill_chunk
from decoding.planning.forward_cost import attention_flops, head_flops, matmul_flops, prefill_flops
from decoding.probe.rates import RUNS, median_seconds, random_tensor, time_once
from decoding.probe.split_rates import split_rates
from decoding.speculation.rejection_sampler import Draft, rejection_sample
from decoding.speculation.sampling import Sampling
from offload.attention import partial_attention
from offload.cache.static_forward import Place, StaticForward
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
from parallel.formats.plane_format import PLANE_FORMATS
from parallel.model.loading import random_model
from parallel.ranks.process_group import TensorParallelGroup
from parallel.weights.planes import Planes
from parallel.weights.selection import plane_kernels

# query tokens of a retrieval forward, of a verification and of a prefill chunk
_RETRIEVAL_ROWS = 3
_VERIFIED_ROWS = 33
_PREFILL_ROWS = 4096
_KV_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}  # much more than any processor cache
_PREFILL_LAYERS = 8  # layers of a model compared with one of two layers
_PREFILL_S = 0.5  # target duration of a prefill run; slow devices get a shorter prompt
_PREFIX = 32_768  # tokens scored by a selection
_KEY_BLOCKS = 8  # key blocks of the batch-invariant attention
_LARGE_BUDGET = 16_384  # retrieval budget compared with the default one
_SAMPLING = Sampling(0.6, top_p=0.9)
_SHORT_FORWARDS = 60  # repeats of a fast forward of one query token
_SHORT_LAYERS = 5  # layers of a model compared with a single-layer one
_SHORT_CONTEXT = 1024  # tokens; attention uses another algorithm for very few
_LARGE = {"hidden_size": 4096, "intermediate_size": 11_008, "num_attention_heads": 32}
_SMALL = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8}


def default_dimensions(device: torch.device) -> ModelConfig:
    """Return the model dimensions used if no model is given: a 7B, or a smaller model on a CPU."""
    sizes: dict[str, Any] = _SMALL if device.type == "cpu" else _LARGE
    config = LlamaConfig(
        **sizes,
        vocab_size=32_000,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        max_position_embeddings=1 << 17,
    )
    return ModelConfig.from_hf(config)


def kernel_rates(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measure a hardware profile's kernel rates, on whole layers of this model on one rank."""
    return _Kernels(config, device, dtype).rates() | split_rates(config, device, dtype)


def _large_matrix(device: torch.device) -> tuple[int, int]:
    """Return rows and columns of a matrix that is larger than any processor cache."""
    return (1 << 15, 4096) if device.type == "cpu" else (1 << 16, 8192)


def _packed_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the weights unpacked per second, by a product with one row where kernels can."""
    rows, columns = _large_matrix(device)
    fmt = PLANE_FORMATS["Q4_K"]
    planes = Planes(fmt, rows, columns, 0, device)
    planes.clear(slice(None))
    kernels, _ = plane_kernels(device.type, dtype, fmt)
    if kernels is None:
        out = torch.empty(rows, columns, device=device, dtype=dtype)
        return out.numel() / median_seconds(lambda: planes.unpack(slice(None), out))
    x = torch.ones(1, columns, device=device, dtype=dtype)
    return rows * columns / median_seconds(lambda: kernels.multiply(x, planes, 0, dtype))


class _Kernels:
    """The kernels of a model's layers on one device."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype):
        self.config = replace(
            config, sliding_window=None, windowed_rope=None, windowed_heads=None, recurrent=None
        )
        self.device, self.dtype = device, dtype
        self.layer = replace(self.config, layers=1)
        self.layout = self.layer.kv_layout(1, dtype).in_pairs
        self._captured: list[Callable[[], Tensor]] = []  # with the tensors that graphs access

    def rates(self) -> dict[str, float]:
        """Measure all rates, keyed by the fields of a hardware profile."""
        rates = {"memory_rate": self.memory_rate(), **self.attention_rates()}
        if self.dtype.itemsize == 2:
            rates["packed_rate"] = _packed_rate(self.device, self.dtype)
        rates["chunk_s"] = self.chunk_seconds(rates)
        rates["matmul"] = self.matmul_rate(rates["prefill_attention"])
        rates |= self.retrieval_rates()
        rates |= self.launch_seconds(rates["memory_rate"], rates["kv_rate"])
        if self.device.type == "cpu":  # elsewhere reading the weights hides extra query tokens
            rates |= self.extra_query_tokens()
        return rates | sampling_seconds(self.config.vocab, self.device)

    def memory_rate(self) -> float:
        """Measure the bytes/s of weights read by a matmul with one row."""
        rows, columns = _large_matrix(self.device)
        weight = torch.ones(rows, columns, device=self.device, dtype=self.dtype)
        x = torch.ones(1, columns, device=self.device, dtype=self.dtype)
        return weight.nbytes / median_seconds(lambda: F.linear(x, weight))

    def launch_seconds(self, memory_rate: float, kv_rate: float) -> dict[str, float]:
        """Measure the overhead of a layer and of a forward beyond reading weights and KV.

        And the whole time of a layer that is not captured, where others are.
        """
        layer_s, head_s = self._short_forward_s(1, _SHORT_CONTEXT)
        eager = {}
        if cuda_graphs_supported(TensorParallelGroup(device=self.device)):
            eager = {"eager_layer_s": self._short_forward_s(1, _SHORT_CONTEXT, captured=False)[0]}
        weights = matmul_flops(self.layer) / 2 * self.dtype.itemsize
        head = head_flops(self.config, 1) / 2 * self.dtype.itemsize
        kv = self.layout.bytes(_SHORT_CONTEXT)
        return {
            "layer_s": max(0.0, layer_s - weights / memory_rate - kv / kv_rate),
            "forward_s": max(0.0, head_s - head / memory_rate),
            **eager,
        }

    def extra_query_tokens(self) -> dict[str, float]:
        """Measure the FLOP/s of extra query tokens in short forwards."""
        one, _ = self._short_forward_s(1)
        rates = {}
        for rows in (3, 5, _VERIFIED_ROWS):
            layer_s, _ = self._short_forward_s(rows)
            flops = (rows - 1) * matmul_flops(self.layer)
            if layer_s > one:
                rates[f"matmul_{rows}"] = flops / (layer_s - one)
        return rates

    def _short_forward_s(
        self, rows: int, context: int = 1, captured: bool = True
    ) -> tuple[float, float]:
        """Measure a forward after `context` tokens: seconds per layer, and all other seconds."""
        one_layer_s = self._model_s(1, rows, context, captured)
        layer_s = self._model_s(_SHORT_LAYERS, rows, context, captured) - one_layer_s
        layer_s /= _SHORT_LAYERS - 1
        return layer_s, one_layer_s - layer_s

    def _model_s(self, layers: int, rows: int, context: int, captured: bool) -> float:
        """Measure a forward of a model with this number of layers, captured where possible."""
        config, device = replace(self.config, layers=layers), self.device
        rotary = config.rotary(1, context + 2 * _VERIFIED_ROWS, self.dtype, device)
        shape = StreamingCacheSpec(1, context, _VERIFIED_ROWS)
        cache = StreamingCache(config.kv_layout(1, self.dtype), shape, rotary, device)
        group = TensorParallelGroup(device=device)
        model = random_model(config, group, self.dtype)
        run = GraphRunner(captured and cuda_graphs_supported(group), group.graph_capturer)
        run.capture(model, cache, [rows])
        for chunk in torch.zeros(context, dtype=torch.int64, device=device).split(_VERIFIED_ROWS):
            model(chunk, cache, 1)
            cache.advance(len(chunk))
        tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        # Read before each forward, so that weights come from memory, as after a long context.
        other_data = torch.ones(_KV_BYTES[device.type] // 4, device=device)
        repeats = max(RUNS, _SHORT_FORWARDS // rows)
        return median_seconds(
            lambda: run(model, tokens, cache, rows), repeats, lambda: other_data.sum()
        )

    def attention_rates(self) -> dict[str, float]:
        """Measure attention of one query token, of extra query tokens, and of a prefill."""
        layout, flops = self.layout, attention_flops(self.layer, 1)
        room = _KV_BYTES[self.device.type] // layout.bytes(1)
        tokens = max(2 * _PREFILL_ROWS, min(1 << 17, room))
        # (2, N, Hkv, D)
        kv = self._random(layout.shape(1, tokens))[0].transpose(1, 2)
        one = self._attention_s(kv, 1, causal=False)
        several = self._attention_s(kv, _VERIFIED_ROWS, causal=False)
        keys = min(tokens, 4 * _PREFILL_ROWS)
        many = self._attention_s(kv[:, :keys], _PREFILL_ROWS, causal=True, statistic=min)
        pairs = _PREFILL_ROWS * (keys - _PREFILL_ROWS / 2)
        rates = {"kv_rate": layout.bytes(tokens) / one, "prefill_attention": pairs * flops / many}
        # Otherwise reading hides the extra query tokens, and their rate cannot be measured.
        if several > one:
            rates["attention"] = (_VERIFIED_ROWS - 1) * tokens * flops / (several - one)
        return rates

    def _attention_s(
        self,
        kv: Tensor,
        rows: int,
        causal: bool,
        statistic: Callable[[list[float]], float] = statistics.median,
    ) -> float:
        """Measure the attention of `rows` query tokens over kv (2, N, Hkv, D)."""
        q = self._random((rows, self.layer.heads, self.layer.head_dim))
        return median_seconds(
            lambda: partial_attention(q, kv[0], kv[1], causal)[0], statistic=statistic
        )

    def chunk_seconds(self, rates: Mapping[str, float]) -> float:
        """Measure batch-invariant attention's overhead per key block and head beyond these rates.

        It is 0 with fused kernels, which handle a whole layer at once. On a GPU without them it
        consists of launches only.
        """
        layout, tokens = self.layout, _KEY_BLOCKS * KEY_BLOCK
        groups = self.layer.heads // self.layer.kv_heads
        if (
            batch_invariant_kernels(self.device.type, self.dtype, layout.head_dim, groups)[0]
            is not None
        ):
            return 0.0
        kv = self._random(layout.shape(1, tokens))[0]
        q = self._random((ROW_BLOCK, self.layer.heads, self.layer.head_dim))
        traffic = ByteCounters()
        seconds = median_seconds(lambda: batch_invariant_attention(q, [kv], traffic)[0])
        if self.device.type == "cpu":
            seconds -= layout.bytes(tokens) / rates["kv_rate"]
            scores = (ROW_BLOCK - 1) * attention_flops(self.layer, tokens)
            seconds -= scores / rates["attention"] if "attention" in rates else 0.0
        return max(0.0, seconds) / (_KEY_BLOCKS * layout.heads)

    def matmul_rate(self, attention: float) -> float:
        """Measure the FLOP/s of a prefill beside attention.

        On a GPU by the difference between models: launching the first layers takes longer than
        computing them. The last layer of a model computes little.
        """
        whole_s, tokens = self._prefill_s(2)
        matmul, scores = prefill_flops(replace(self.config, layers=2), tokens)
        seconds = whole_s
        if self.device.type != "cpu":
            few_s, (whole_s, _) = whole_s, self._prefill_s(_PREFILL_LAYERS, tokens)
            flops = prefill_flops(replace(self.config, layers=_PREFILL_LAYERS), tokens)
            matmul, scores, seconds = flops[0] - matmul, flops[1] - scores, whole_s - few_s
        return matmul / max(seconds - scores / attention, 0.1 * whole_s)

    def _prefill_s(self, layers: int, tokens: int | None = None) -> tuple[float, int]:
        """Measure the prefill of a model with this number of layers: seconds, and tokens.

        Without `tokens`, of as many as take long enough.
        """
        config = replace(self.config, layers=layers)
        link = "view" if self.device.type == "cpu" else "auto"
        settings = Settings(mode="plain", gpu_kv_layers=layers, link=link)
        model = random_model(config, TensorParallelGroup(device=self.device), self.dtype)
        runtime = Runtime.create(model, None, "plain", settings)
        chunk = prefill_chunk(runtime.requirements)
        count = tokens or 256

        def prefill() -> Tensor:
            return SequenceState(runtime, [0] * count, 1).prefill()

        try:
            prefill()  # compiles kernels
            while tokens is None and count < chunk and 2 * time_once(prefill) < _PREFILL_S:
                count = min(2 * count, chunk)
            return median_seconds(prefill, statistic=min), count
        finally:
            runtime.link.close()

    def retrieval_rates(self) -> dict[str, float]:
        """Measure selection, and attention of one query token to the 8-bit selected KV.

        The attention rate is that of additional tokens, without constant overhead.
        """
        small, select_s = self._retrieval(DEFAULT_RETRIEVAL_BUDGET)
        rates = {"score_rate": self.layout.bytes(_PREFIX) / select_s}
        if self.dtype.itemsize == 2:
            large, _ = self._retrieval(_LARGE_BUDGET)
            # Read before each run, so that the cache comes from memory.
            other_data = torch.ones(_KV_BYTES[self.device.type] // 4, device=self.device)
            small_s, large_s = (
                median_seconds(attend, before=lambda: other_data.sum()) for attend in (small, large)
            )
            if large_s > small_s:
                kv = self.layout.bytes(_LARGE_BUDGET - DEFAULT_RETRIEVAL_BUDGET)
                rates["int8_rate"] = kv / (large_s - small_s)
        return rates

    def _retrieval(self, budget: int) -> tuple[Callable[[], Tensor], float]:
        """Return a function that attends to a retrieval cache, and the seconds of a selection."""
        layout, defaults, rows = self.layout, Settings(), _VERIFIED_ROWS
        rotary = self.layer.rotary(1, _PREFIX + 2 * rows, self.dtype, self.device)
        shape = RetrievalCacheSpec.of(budget, defaults.chunk_size, _PREFIX + rows, rows, rows)
        shape = replace(shape, quantised=self.dtype.itemsize == 2)
        policy = POLICIES[defaults.policy]()
        cache = RetrievalCache(layout, shape, policy, rotary, self.device, min_interval=0)
        prefix = self._random(layout.shape(1, _PREFIX))[0]
        recent = self._random(layout.shape(1, rows))[0]
        q = self._random((rows, self.layer.heads, self.layer.head_dim))
        keys, values = recent.transpose(1, 2)[:, :1]  # a single token (1, Hkv, D)

        def select() -> Tensor:
            cache.on_forward(_PREFIX, _PREFIX, _PREFIX + rows)
            cache.on_attention(0, 0, q, prefix, recent)
            return cache.buffers(0).kv

        select_s = median_seconds(select)
        group = TensorParallelGroup(device=self.device)
        if not cuda_graphs_supported(group):
            return lambda: cache.attend(0, q[:1], keys, values, _PREFIX)[0], select_s
        static = StaticForward([cache], 1)
        at = cache.slot_and_position(_PREFIX)
        static.place(0, Place(1, _PREFIX, *at, cache.first_valid_slot()))

        def attend() -> Tensor:
            static.begin_forward(1)
            return static.attend(0, q[:1], keys, values, 0)[0]

        attend()  # compiles kernels
        self._captured.append(attend)
        return group.graph_capturer.capture(attend), select_s

    def _random(self, shape: Sequence[int]) -> Tensor:
        return random_tensor(*shape, device=self.device, dtype=self.dtype)


def sampling_seconds(vocab: int, device: torch.device) -> dict[str, float]:
    """Measure computing the distribution of a row of logits, and sampling from distributions."""
    few_s, many_s = (
        _rejection_sampling_s(vocab, device, rows) for rows in (_RETRIEVAL_ROWS, _VERIFIED_ROWS)
    )
    row_s = max(0.0, many_s - few_s) / (_VERIFIED_ROWS - _RETRIEVAL_ROWS)
    return {"sample_s": row_s, "draw_s": max(0.0, few_s - _RETRIEVAL_ROWS * row_s)}


def _rejection_sampling_s(vocab: int, device: torch.device, rows: int) -> float:
    """Measure the distributions of `rows` rows of logits and verifying `rows` - 1 draft tokens."""
    generator = torch.Generator(device)
    logits = random_tensor(rows, vocab, device=device)
    draft = Draft(
        torch.zeros(rows - 1, dtype=torch.int64, device=device),
        torch.ones(rows - 1, vocab, device=device) / vocab,
    )
    return median_seconds(
        lambda: torch.tensor(rejection_sample(draft, _SAMPLING.probs(logits), generator))
    )
