"""Models of a GPU day, with random weights or loaded, and prefilled sessions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from bench.gpu.choices import Choices, Context
from bench.harness.dimensions import LLAMA_7B, LLAMA_8B, LLAMA_68M, TINY, config_of
from bench.harness.text import prompt_tokens
from bench.speed.forwards import DRAFTED
from decoding import Engine, Settings
from decoding.config.defaults import USABLE_SHARE
from decoding.config.settings import LEVELS
from decoding.engine.session import SequenceState
from decoding.engine.warm_up import warm_up
from decoding.models.runtime import Runtime
from decoding.planning.forward_cost import prefill_flops
from decoding.probe.rates import matmul_rate
from offload.errors import InsufficientMemoryError
from offload.memory.host import host_available
from parallel.config.model_config import ModelConfig
from parallel.errors import ConfigError
from parallel.model.loading import parameter_bytes, random_model
from parallel.model.transformer import Transformer
from parallel.ranks.process_group import TensorParallelGroup

# targets and drafts with random weights
PAIRS = {
    "7b": (LLAMA_7B, LLAMA_68M),
    "8b": (LLAMA_8B, LLAMA_68M | {"vocab_size": 128_256}),
    "tiny": (TINY, TINY | {"num_hidden_layers": 1}),
}
_ROOM = 1024  # largest number of new tokens
_RESERVED = (24 << 30) - 25.2e9  # bytes used by driver and context on a 4090 (profiles.json)


def planned_memory(card_gib: float, weights: int) -> int:
    """Return the `device_memory` with which a larger GPU makes the plan of a smaller one.

    A plan uses USABLE_SHARE of the memory that is free beside the weights, but all of a limit that
    is set.

    Args:
        card_gib: nominal memory of the smaller GPU, GiB: 24 for an RTX 4090.
        weights: bytes of all models' weights.
    """
    return int(weights + USABLE_SHARE * (usable_bytes(card_gib) - weights))


def usable_bytes(card_gib: float) -> float:
    """Return the bytes that a process can allocate on a GPU with `card_gib` GiB."""
    return card_gib * (1 << 30) - _RESERVED


@cache
def load_models(
    choices: Choices, group: TensorParallelGroup
) -> tuple[Transformer, Transformer | None, Any | None]:
    """Return target, draft and tokenizer, which is None for random weights.

    Models are loaded once per process. Raises TierForceError.
    """
    if choices.target not in PAIRS:
        settings = Settings(rope=choices.rope, link=choices.link, mode="auto", graphs=False)
        engine = Engine.from_pretrained(choices.target, choices.draft, settings, group=group)
        engine.runtime.link.close()
        return engine.runtime.target, engine.runtime.draft, engine.tokenizer
    pair = PAIRS[choices.target]
    large, small = (random_model(config_of(sizes), group, torch.bfloat16) for sizes in pair)
    return large, small, None


def weight_bytes(context: Context) -> int:
    """Return the bytes of all models' weights; shared ones count once."""
    target, draft, _ = load_models(context.choices, context.group)
    return parameter_bytes(target, *([] if draft is None else [draft]))


def mode_of(context: Context, mode: str) -> str:
    """Return a mode, or its variant without a draft model if there is none."""
    _, draft, _ = load_models(context.choices, context.group)
    return mode.replace("hierarchical", "retrieval") if draft is None else mode


@contextmanager
def prefilled_session(
    context: Context, tokens: int, mode: str, **settings: Any
) -> Iterator[SequenceState]:
    """Yield a session after its prefill, and free all its memory afterwards.

    The time of allocation and prefill is reported.

    Args:
        context: the part's context.
        tokens: prompt tokens; fewer if host memory or the model's context limit requires it.
        mode: as in `Settings`.
        settings: further settings, beside those of the options.
    """
    choices = context.choices
    context.group.graph_capturer.free_cached()  # memory of previous sessions
    target, draft, tokenizer = load_models(choices, context.group)
    tokens = min(tokens, max_prompt(target.config))
    tokens = fit_context(target.config, target.embed.weight.dtype, tokens)
    common: dict[str, Any] = {
        "retrieval_budget": min(choices.retrieval_budget, tokens // 4),
        "link": choices.link,
        "rope": choices.rope,
        "graphs": context.graphs,
    }
    chosen = Settings(mode=mode, **common | settings)
    needs_draft = "draft" in LEVELS[mode]
    runtime = Runtime.create(target, draft if needs_draft else None, mode, chosen)
    try:
        before = driver_bytes(context)
        warm_up(runtime)
        loaded = (driver_bytes(context) - before) / 1e6
        context.add("loaded before the plan, beside torch's allocator", loaded, "MB")
        started = time.perf_counter()
        session = SequenceState(runtime, prompt_of(target.config, tokenizer, tokens), DRAFTED)
        context.add("memory planned, allocated and pinned", time.perf_counter() - started, "s")
        started = time.perf_counter()
        session.prefill()[0, 0].item()
        seconds = time.perf_counter() - started
        context.add(f"prefill of {tokens:,} tokens", seconds, "s")
        context.add("prefill", tokens / seconds, "tokens/s")
        context.add("resident layers", session.plan.memory.resident_layers)
        yield session
        session.close()
    finally:
        runtime.link.close()
        runtime.arena.free()


def driver_bytes(context: Context) -> int:
    """Return the bytes of device memory that torch did not allocate; 0 on a CPU."""
    return context.group.graph_capturer.driver_bytes()


def report_prefill(context: Context, session: SequenceState) -> None:
    """Report the rate of one large matrix product, and the time of a prefill at this rate."""
    target, tokens = session.runtime.target, len(session.prompt)
    rate = matmul_rate(context.device, session.runtime.dtype)
    context.add("one large matrix product", rate / 1e12, "TFLOP/s")
    seconds = sum(prefill_flops(target.config, tokens)) / rate
    context.add("prefill FLOPs at this rate", seconds, "s")


def max_prompt(config: ModelConfig) -> int:
    """Return the longest prompt that leaves room for new tokens. Raises ConfigError."""
    tokens = config.context_limit - _ROOM
    if tokens < 1:
        raise ConfigError(
            f"the target has a context of {config.context_limit:,} tokens, and new tokens need "
            f"{_ROOM:,} of them: use another --target, or extend its context by --rope."
        )
    return tokens


def fit_context(config: ModelConfig, dtype: torch.dtype, tokens: int) -> int:
    """Return up to `tokens`, whose KV takes at most nine tenths of the host's free memory."""
    max_tokens = int(0.9 * host_available()) // config.kv_layout(1, dtype).bytes(1) // 1024 * 1024
    if not max_tokens:
        raise InsufficientMemoryError(
            "not enough free host memory for the KV of 1,024 tokens: free some, or use another "
            "machine."
        )
    return min(tokens, max_tokens)


def prompt_of(config: ModelConfig, tokenizer: Any | None, tokens: int) -> list[int]:
    """Return a prompt of `tokens` tokens: real text, or random ones for random weights."""
    if tokenizer is not None:
        return prompt_tokens(tokenizer, tokens)
    generator = torch.Generator().manual_seed(0)
    random_tokens: list[int] = torch.randint(config.vocab, (tokens,), generator=generator).tolist()
    return random_tokens
