"""What passes of a model reach on this device, measured on the kernels that they are made of: small
runs from which `decoding.planning.forecast` tells what large ones take.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from decoding.planning.defaults import DEFAULT_BUDGET, SUMMARY_SHARES
from decoding.planning.passes import attention_flops, matmul_flops, prefill_flops
from decoding.runtime import Runtime
from decoding.session import Session
from decoding.settings import Settings
from decoding.speculation.sampling import Sampling
from decoding.speculation.verify import Draft, verify
from offload.attention import partial_attention
from offload.layout import KVLayout
from offload.retrieval import RetrievalCache
from offload.retrieval_shape import RetrievalShape
from offload.selection import POLICIES
from offload.streaming import StreamingCache
from offload.streaming_shape import StreamingShape
from parallel.config import ModelConfig
from parallel.graphs import GraphRunner, graphs_work
from parallel.group import Group
from parallel.loading import random_model

# tokens of a pass over the retrieval cache, of a verification, of a chunk of prefill
_FEW, _ROWS, _MANY = 3, 33, 4096
_KV = {"cpu": 128 << 20, "cuda": 1 << 30}  # bytes: far more than any cache holds
_CHOSEN = 32_768  # tokens that a choice looks through, at most
_WARPED = Sampling(0.6, top_p=0.9)
_REPEATS = 9


def usual(device: torch.device) -> ModelConfig:
    """The dimensions that rates are measured with where no model is named: those of a 7B, or of a
    smaller one on a CPU.
    """
    large = {"hidden_size": 4096, "intermediate_size": 11_008, "num_attention_heads": 32}
    small = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8}
    sizes: dict[str, Any] = {**(small if device.type == "cpu" else large), "vocab_size": 32_000}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    return ModelConfig.from_hf(
        LlamaConfig(**sizes, rope_parameters=rope, max_position_embeddings=1 << 17)
    )


def pass_rates(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Numbers of `Hardware` that depend on kernels: a layer of this model, on one rank that has it
    all.
    """
    layer = replace(config, layers=1)
    found = {"memory_rate": _reading(device, dtype), **_attention(layer, device, dtype)}
    found["matmul"] = _products(layer, device, dtype, found["prefill_attention"])
    found |= _choices(layer, device, dtype)
    one, five = (_short(replace(config, layers=layers), device, dtype) for layers in (1, 5))
    each = (five - one) / 4
    weights, head = (
        matmul_flops(layer) / 2 * dtype.itemsize,
        config.vocab * config.hidden * dtype.itemsize,
    )
    found["layer_s"] = max(0.0, each - weights / found["memory_rate"])
    found["pass_s"] = max(0.0, one - each - head / found["memory_rate"])
    return {**found, **_sampling(config.vocab, device)}


def _reading(device: torch.device, dtype: torch.dtype) -> float:
    """Bytes of weights a second that a product with one row reads."""
    size, rows = (4096, 1 << 15) if device.type == "cpu" else (8192, 1 << 16)
    weight, x = (
        torch.ones(rows, size, device=device, dtype=dtype),
        torch.ones(1, size, device=device, dtype=dtype),
    )
    return weight.nbytes / typical(lambda: F.linear(x, weight))


def _short(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> float:
    """A pass of one token with nothing before it: all that is not attention over a text."""
    layout, rotary = config.kv_layout(1, dtype), config.rotary(1, 2 * _ROWS, dtype, device)
    shape = StreamingShape(1, _ROWS // 2, _ROWS // 2)
    cache = StreamingCache(layout, shape, rotary, device)
    group = Group(device=device)
    model, token = (
        random_model(config, group, dtype),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    run = GraphRunner(graphs_work(group), group.recorder)
    run.warm(model, token, cache, 1)
    others = torch.ones(_KV[device.type] // 4, device=device)
    # weights come from memory, as behind a text
    return typical(lambda: run(model, token, cache, 1), 60, lambda: others.sum())


def _attention(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    layout = config.kv_layout(1, dtype)
    tokens = max(2 * _MANY, min(1 << 17, _KV[device.type] // layout.bytes(1)))
    # (2, N, Hkv, D)
    kv = torch.randn(layout.shape(1, tokens), device=device, dtype=dtype)[0].transpose(1, 2)

    def seconds(
        rows: int, keys: int, causal: bool, of: Callable[[list[float]], float] = statistics.median
    ) -> float:
        q = torch.randn(rows, config.heads, config.head_dim, device=device, dtype=dtype)
        return typical(lambda: partial_attention(q, kv[0, :keys], kv[1, :keys], causal)[0], of=of)

    one, several = (seconds(rows, tokens, causal=False) for rows in (1, _ROWS))
    keys = min(tokens, 4 * _MANY)
    many, pairs = seconds(_MANY, keys, causal=True, of=min), _MANY * (keys - _MANY / 2)
    flops = attention_flops(config)
    found = {"kv_rate": layout.bytes(tokens) / one, "prefill_attention": pairs * flops / many}
    # else a device does so many rows in the shadow of reading, and no number says how fast
    if several > one:
        found["attention"] = (_ROWS - 1) * tokens * flops / (several - one)
    return found


def _products(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, attention: float
) -> float:
    """Operations a second of all that a prefill does beside attention; of two layers, since of the
    last one little is made.
    """
    config = replace(config, layers=2)
    settings = Settings(
        mode="plain", resident_layers=2, link="view" if device.type == "cpu" else "auto"
    )
    models = Runtime.make(
        random_model(config, Group(device=device), dtype), None, "plain", settings
    )
    tokens = models.needs.prefill_chunk
    prompt = [0] * tokens
    try:
        seconds = typical(lambda: Session(models, prompt, 1).prefill(), of=min)
    finally:
        models.link.close()
    products, scores = prefill_flops(config, tokens)
    return products / max(seconds - scores / attention, 0.1 * seconds)


def _choices(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    layout = config.kv_layout(1, dtype)
    usual = Settings()
    shape = RetrievalShape.of(
        DEFAULT_BUDGET, usual.chunk_size, usual.summary_size, _CHOSEN + _ROWS, _ROWS, _ROWS
    )
    _, summaries = shape.split(_CHOSEN, _ROWS)
    # which selects as much
    selected = DEFAULT_BUDGET - summaries
    bare = RetrievalShape.of(selected, usual.chunk_size, 0, _CHOSEN + _ROWS, _ROWS, _ROWS)
    plain = _choice_seconds(config, layout, bare, 1, device)
    whole, turned = (
        _choice_seconds(config, layout, shape, turns, device) for turns in (1, SUMMARY_SHARES)
    )
    made = max(0.0, (whole - turned) * SUMMARY_SHARES / (SUMMARY_SHARES - 1))
    costs = {"score_rate": plain, "summary_rate": made, "weigh_rate": whole - plain - made}
    # noise may leave nothing
    return {name: layout.bytes(_CHOSEN) / seconds for name, seconds in costs.items() if seconds > 0}


def _choice_seconds(
    config: ModelConfig, layout: KVLayout, shape: RetrievalShape, turns: int, device: torch.device
) -> float:
    """One choice over a prefix of random keys and values, which makes one in `turns` of the
    summaries anew.
    """
    rotary = config.rotary(1, 2, layout.dtype, device)
    policy = POLICIES[Settings().policy]()
    cache = RetrievalCache(
        layout, shape, policy, rotary, device, min_interval=0, summary_shares=turns
    )
    prefix, recent = (
        torch.randn(layout.shape(1, n), device=device, dtype=layout.dtype)[0]
        for n in (_CHOSEN, _ROWS)
    )
    q = torch.randn(_ROWS, config.heads, config.head_dim, device=device, dtype=layout.dtype)

    def choose() -> Tensor:
        cache.follow(_CHOSEN, _CHOSEN, _CHOSEN + _ROWS)
        cache.observe(0, 0, q, prefix, recent)
        return cache._kv

    return typical(choose)


def _sampling(vocab: int, device: torch.device) -> dict[str, float]:
    generator = torch.Generator(device)

    def seconds(rows: int) -> float:
        logits = torch.randn(rows, vocab, device=device)
        draft = Draft(
            torch.zeros(rows - 1, dtype=torch.int64, device=device),
            torch.ones(rows - 1, vocab, device=device) / vocab,
        )
        return typical(lambda: torch.tensor(verify(draft, _WARPED.law(logits), generator)))

    few, many = seconds(_FEW), seconds(_ROWS)
    row = max(0.0, many - few) / (_ROWS - _FEW)
    return {"sample_s": row, "draw_s": max(0.0, few - _FEW * row)}


def typical(
    work: Callable[[], Tensor],
    repeats: int = _REPEATS,
    before: Callable[[], Tensor] | None = None,
    of: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Seconds of one of a few runs, each until its result is there; the first does not count, nor
    what goes `before` each.

    `of` them the median, or what else: the least where a prefill, which averages over seconds, is
    told from a short run.
    """
    times = []
    for _ in range(repeats + 1):
        if before is not None:
            before().item()
        started = time.perf_counter()
        work().flatten()[0].item()
        times.append(time.perf_counter() - started)
    return of(times[1:])
