"""The models of a GPU day, of drawn weights or loaded, and sessions that have read a prompt."""

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

# target and draft of drawn weights
PAIRS = {
    "7b": (LLAMA_7B, LLAMA_68M),
    "8b": (LLAMA_8B, LLAMA_68M | {"vocab_size": 128_256}),
    "tiny": (TINY, TINY | {"num_hidden_layers": 1}),
}
_ROOM = 1024  # tokens that are written behind a prompt, at most
_TAKEN = (24 << 30) - 25.2e9  # bytes that driver and context take of a 4090 (profiles.json)


def planned_memory(card_gib: float, weights: int) -> int:
    """Return the `device_memory` with which a larger GPU plans what a card of this size plans.

    Of what is free beside the weights a plan uses USABLE_SHARE; of a limit that is set, all.

    Args:
        card_gib: memory of the card, GiB, as its name says: 24 of an RTX 4090.
        weights: bytes of all models' weights.
    """
    return int(weights + USABLE_SHARE * (usable_bytes(card_gib) - weights))


def usable_bytes(card_gib: float) -> float:
    """Return the bytes of a card of so many GiB that a process can allocate."""
    return card_gib * (1 << 30) - _TAKEN


@cache
def loaded(
    choices: Choices, group: TensorParallelGroup
) -> tuple[Transformer, Transformer | None, Any | None]:
    """Return target, draft and tokenizer; models of drawn weights have no tokenizer.

    They are made once a process. Raises TierForceError.
    """
    if choices.target not in PAIRS:
        settings = Settings(rope=choices.rope, link=choices.link, mode="auto", graphs=False)
        engine = Engine.from_pretrained(choices.target, choices.draft, settings, group=group)
        engine.runtime.link.close()
        return engine.runtime.target, engine.runtime.draft, engine.tokenizer
    pair = PAIRS[choices.target]
    large, small = (random_model(config_of(each), group, torch.bfloat16) for each in pair)
    return large, small, None


def weight_bytes(context: Context) -> int:
    """Return the bytes of all models' weights; what a draft shares counts once."""
    target, draft, _ = loaded(context.choices, context.group)
    return parameter_bytes(target, *([] if draft is None else [draft]))


def mode_of(context: Context, mode: str) -> str:
    """Return a mode, or that without a draft model where there is none."""
    _, draft, _ = loaded(context.choices, context.group)
    return mode.replace("hierarchical", "retrieval") if draft is None else mode


@contextmanager
def prefilled(context: Context, tokens: int, mode: str, **settings: Any) -> Iterator[SequenceState]:
    """Yield a session that has read a prompt, and free all that it holds.

    What it took is reported.

    Args:
        context: of the part.
        tokens: of the prompt; fewer where host memory or the model's positions end before.
        mode: as in `Settings`.
        settings: others, beside those that the options name.
    """
    choices = context.choices
    if context.device.type == "cuda":
        torch.cuda.empty_cache()  # of the sessions before
    target, draft, tokenizer = loaded(choices, context.group)
    tokens = min(tokens, longest_prompt(target.config))
    tokens = context_that_fits(target.config, target.embed.weight.dtype, tokens)
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
        started = time.perf_counter()
        session = SequenceState(runtime, prompt_of(target.config, tokenizer, tokens), DRAFTED)
        context.add("memory planned, allocated and pinned", time.perf_counter() - started, "s")
        started = time.perf_counter()
        session.prefill()[0, 0].item()
        seconds = time.perf_counter() - started
        context.add(f"prefill of {tokens:,} tokens", seconds, "s")
        context.add("prefill", tokens / seconds, "tokens/s")
        context.add("resident layers", session.plan.resident_layers)
        yield session
        session.close()
    finally:
        runtime.link.close()
        runtime.arena.free()


def report_prefill(context: Context, session: SequenceState) -> None:
    """Report the share that a prefill reaches of the rate of one large matrix product."""
    target, tokens = session.runtime.target, len(session.prompt)
    arithmetic = matmul_rate(context.device, session.runtime.dtype)
    context.add("one large matrix product", arithmetic / 1e12, "TFLOP/s")
    least = sum(prefill_flops(target.config, tokens)) / arithmetic
    context.add("the prefill's operations at this rate", least, "s")


def longest_prompt(config: ModelConfig) -> int:
    """Return the tokens of a prompt that leave a model room to write. Raises ConfigError."""
    longest = config.context_limit - _ROOM
    if longest < 1:
        raise ConfigError(
            f"the target has a context of {config.context_limit:,} tokens, and what is written "
            f"needs room for {_ROOM:,}: use another --target, or stretch it by --rope."
        )
    return longest


def context_that_fits(config: ModelConfig, dtype: torch.dtype, wanted: int) -> int:
    """Return up to `wanted` tokens, whose KV leaves a tenth of the host's free memory alone."""
    fits = int(0.9 * host_available()) // config.kv_layout(1, dtype).bytes(1) // 1024 * 1024
    if not fits:
        raise InsufficientMemoryError("there is not enough host memory for the KV of 1,024 tokens.")
    return min(wanted, fits)


def prompt_of(config: ModelConfig, tokenizer: Any | None, tokens: int) -> list[int]:
    """Return so many tokens of real text, and drawn ones for drawn weights."""
    if tokenizer is not None:
        return prompt_tokens(tokenizer, tokens)
    generator = torch.Generator().manual_seed(0)
    drawn: list[int] = torch.randint(config.vocab, (tokens,), generator=generator).tolist()
    return drawn
