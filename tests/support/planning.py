"""Random planning cases: models, a machine, a request and settings."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from transformers import LlamaConfig

import decoding.planning.requirements
from decoding import Settings
from decoding.config.settings import LEVELS
from decoding.planning.cost_model import CostModel
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.plan import Plan
from decoding.planning.planner import Planner
from decoding.planning.requirements import Requirements, Strategy
from decoding.planning.round_cost import Acceptance
from offload.dtypes import dtype_spec
from offload.retrieval.policy_specs import POLICY_NAMES
from parallel.config.model_config import ModelConfig

MODES = tuple(LEVELS)


@dataclass(frozen=True)
class Case:
    """Models, a machine, a request and settings."""

    target: ModelConfig
    draft: ModelConfig
    hardware: HardwareProfile
    settings: Settings
    prompt: int
    max_new_tokens: int
    acceptance: Acceptance


def dimensions(draw: random.Random, tiny: bool) -> ModelConfig:
    kv_heads, group = draw.choice((1, 2, 4)), draw.choice((1, 2, 4))
    head_dim = draw.choice((8, 16) if tiny else (32, 64, 128))
    hidden = kv_heads * group * head_dim
    return ModelConfig.from_hf(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=draw.randint(1, 4) * hidden,
            num_attention_heads=kv_heads * group,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            num_hidden_layers=draw.randint(1, 5 if tiny else 24),
            vocab_size=97,
            max_position_embeddings=1 << 20,
            tie_word_embeddings=draw.random() < 0.3,
        )
    )


def random_settings(draw: random.Random, layers: int, context: int) -> Settings:
    chunk = draw.choice((1, 4, 8))
    mode = draw.choice(MODES)
    split = "split" in LEVELS[mode]
    resident = draw.randint(0, layers)
    dtype = draw.choice(("bfloat16", "float16" if split else "float32"))
    return Settings(
        mode=mode,
        dtype=dtype,
        split_kv_layers=draw.choice((None, draw.randint(0, layers - resident))) if split else None,
        compress_offload=draw.choice((None, True)) if dtype == "bfloat16" else None,
        retrieval_budget=draw.choice((None, None, max(chunk, context // draw.randint(2, 20)))),
        chunk_size=chunk,
        policy=draw.choice(POLICY_NAMES),
        selection_interval=draw.choice((None, None, 4)),
        num_draft_tokens=draw.choice((None, None, draw.randint(1, 20))),
        num_inner_draft_tokens=draw.choice((None, 3)),
        window=draw.randint(4, 64),
        gpu_kv_layers=draw.choice((None, None, resident)),
        prefill_chunk=draw.choice((None, 256)),
    )


def case_of(seed: int, tiny: bool = False) -> Case:
    """Return a case in which layers usually have to be split between device and host."""
    draw = random.Random(seed)
    target, draft = dimensions(draw, tiny), replace(dimensions(draw, True), layers=2)
    context = draw.randint(80, 500) if tiny else int(10 ** draw.uniform(2.5, 6))
    max_new_tokens = draw.randint(1, context // 3)
    settings = random_settings(draw, target.layers, context)
    item = dtype_spec(settings.dtype)
    kv = target.kv_layout(1, item).bytes(context)
    weights = decoding.planning.requirements.weight_bytes(target, 1, item)
    hardware = HardwareProfile(
        name=f"machine {seed}",
        gpus=1,
        device_memory=int(1.2 * weights + draw.uniform(0.3, 3) * kv + 3e7),
        host_memory=int(draw.uniform(0.7, 3) * kv + 1e6),
        link_in=10 ** draw.uniform(8, 11),
        link_out=10 ** draw.uniform(8, 11),
        memory_rate=10 ** draw.uniform(10, 12.3),
        matmul=10 ** draw.uniform(11, 14.5),
        all_reduce_s=0.0,
        all_reduce_rate=1e15,
        layer_s=draw.choice((0.0, 6e-5)),
        runs_ahead=draw.random() < 0.7,
    )
    acceptance = Acceptance(draw.uniform(0.3, 0.99), draw.uniform(0.2, 0.9))
    return Case(
        target, draft, hardware, settings, context - max_new_tokens, max_new_tokens, acceptance
    )


def plan_on(
    machine: HardwareProfile,
    requirements: Requirements,
    prompt: int,
    max_new_tokens: int,
    concurrency: int = 1,
) -> Plan:
    """Return the plan of `tierforce plan` for a request on a machine."""
    return Planner(requirements, CostModel(machine)).plan(prompt, max_new_tokens, concurrency)


def with_budget(requirements: Requirements, budget: int | None) -> Requirements:
    """Return the requirements with this retrieval budget; None: the budget of the settings."""
    return (
        requirements
        if budget is None
        else requirements.with_strategy(Strategy(requirements.mode, budget))
    )


def requirements_of(case: Case) -> Requirements:
    """Return the requirements as `tierforce plan` computes them, without models or torch."""
    mode, item = case.settings.resolved_mode(True), dtype_spec(case.settings.dtype)
    return Requirements(case.target, case.draft, mode, case.settings, item, 1, 1, True)
