"""Forecasts: published results from hardware numbers alone, and the underlying formulas."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.dimensions import LLAMA_7B, LLAMA_13B, LLAMA_68M, config_of
from decoding import Settings
from decoding.config.defaults import DEFAULT_RETRIEVAL_BUDGET
from decoding.planning.cost_model import CostModel
from decoding.planning.forecast import Forecast
from decoding.planning.forward_cost import ForwardCost, matmul_flops, prefill_flops
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.plan import Plan
from decoding.planning.planner import Planner
from decoding.planning.request_spec import RequestSpec
from decoding.planning.requirements import Requirements
from decoding.planning.round_cost import Acceptance
from decoding.speculation.draft_length import best_length, expected_tokens
from offload.errors import InsufficientMemoryError
from offload.layout import SlidingWindow
from parallel.config.model_config import ModelConfig
from parallel.model.loading import random_model
from parallel.ranks.process_group import TensorParallelGroup
from parallel.weights.matrix import Matrix
from support.families import OTHERS
from support.models import tiny_config

PROMPT, NEW = 130_048, 512
SEVEN, THIRTEEN, SMALL = (config_of(sizes) for sizes in (LLAMA_7B, LLAMA_13B, LLAMA_68M))


def requirements_of(target: ModelConfig, mode: str, ranks: int, **choices: Any) -> Requirements:
    settings = Settings(mode=mode, **{"retrieval_budget": DEFAULT_RETRIEVAL_BUDGET, **choices})
    draft = SMALL if mode == "hierarchical" else None
    return Requirements(target, draft, mode, settings, torch.float16, ranks, 1, True)


def planner_on(target: ModelConfig, hardware: str, mode: str, **choices: Any) -> Planner:
    """Return a planner with enough host memory for the 13B, and for any configured layers."""
    machine = replace(HardwareProfile.from_name(hardware), host_memory=256e9)
    if "gpu_kv_layers" in choices:
        machine = replace(machine, device_memory=48e9)
    requirements = requirements_of(target, mode, int(machine.gpus), **choices)
    return Planner(requirements, CostModel(machine))


def forecast_on(target: ModelConfig, hardware: str, mode: str, **choices: Any) -> Forecast:
    planner = planner_on(target, hardware, mode, **choices)
    return planner.costs.forecast(planner.plan(PROMPT, NEW))


def plain_of(planner: Planner, plan: Plan) -> Plan:
    """Return the alternative with plain decoding."""
    (plain,) = [other for other in planner.alternatives(plan) if other.requirements.mode == "plain"]
    return plain


def test_published_plain_offload_of_the_7b() -> None:
    """840 ms/token on two 4090s with 12 resident layers (TriForce, arXiv 2404.11912, table 2)."""
    result = forecast_on(SEVEN, "2x4090", "plain", gpu_kv_layers=12)
    assert result.token_s == pytest.approx(0.840, rel=0.05)
    assert result.verification_bound == "link"


def test_published_plain_offload_of_the_13b_implies_its_resident_layers() -> None:
    """1794 ms/token: of 0 to 10 resident layers, 6 come closest."""
    times = {
        count: forecast_on(THIRTEEN, "2x4090", "plain", gpu_kv_layers=count).token_s
        for count in range(11)
    }
    assert min(times, key=lambda count: abs(times[count] - 1.794)) == 6
    assert times[6] == pytest.approx(1.794, rel=0.05)


@pytest.mark.parametrize(
    ("target", "hardware", "published"),
    [(SEVEN, "2x4090", 0.108), (THIRTEEN, "2x4090", 0.226), (SEVEN, "1x4090", 0.312)],
)
def test_published_hierarchical_rows(target: ModelConfig, hardware: str, published: float) -> None:
    """All three use the acceptance rate implied by the first row."""
    result = forecast_on(target, hardware, "hierarchical")
    assert result.token_s == pytest.approx(published, rel=0.25)
    assert result.verification_bound == "link"


def test_concurrent_requests_share_only_weights_and_launches() -> None:
    planner = planner_on(SEVEN, "1xA100-80", "plain")
    alone = planner.plan(PROMPT, NEW)

    def forecast_of(concurrency: int, prompt: int = PROMPT) -> Forecast:
        spec = replace(alone.spec, prompt=prompt)
        return planner.costs.forecast(replace(alone, spec=spec, concurrency=concurrency))

    for concurrency in (2, 6):
        assert forecast_of(concurrency).link_s == pytest.approx(concurrency * forecast_of(1).link_s)
        assert (
            forecast_of(1).compute_s
            < forecast_of(concurrency).compute_s
            < concurrency * forecast_of(1).compute_s
        )
        assert forecast_of(concurrency).prefill_s == forecast_of(1).prefill_s
        share = forecast_of(concurrency).decode_s / concurrency
        assert forecast_of(concurrency).documents_per_hour == 3600 / (
            forecast_of(1).prefill_s + share
        )
    # With few keys, reading the weights dominates and is shared.
    assert forecast_of(6, 100).compute_s < 1.5 * forecast_of(1, 100).compute_s


def test_published_gain_with_six_concurrent_requests() -> None:
    """1.9 times plain decoding of the same six prompts of 19K tokens on one A100 (the paper,
    greedy), here with the acceptance implied by the first row of the offloading table.

    1.55 is predicted.
    """
    machine = replace(HardwareProfile.from_name("1xA100-80"), device_memory=128e9)
    seconds = {}
    for mode in ("plain", "hierarchical"):
        requirements = requirements_of(SEVEN, mode, 1, retrieval_budget=768, num_draft_tokens=6)
        costs = CostModel(machine)
        seconds[mode] = costs.token_s(Planner(requirements, costs).plan(19_200, 256, 6))
    assert seconds["plain"] / seconds["hierarchical"] == pytest.approx(1.9, rel=0.25)


def test_concurrency_is_limited_by_the_placement_of_a_single_request() -> None:
    costs = CostModel(HardwareProfile.from_name("1xA100-80"))
    planner = Planner(requirements_of(SEVEN, "plain", 1), costs)
    for prompt in (2_000, 30_000, 100_000):
        alone = planner.plan(prompt, NEW)
        shared = planner.max_concurrent(alone, 8)
        count = shared.concurrency
        assert shared.memory == alone.memory
        assert shared.requirements == alone.requirements
        if count < 8:
            assert planner.plan(prompt, NEW, count + 1).memory != alone.memory
        assert (count == 8, count == 1) == (prompt == 2_000, prompt == 100_000)
        per_hour = [costs.forecast(plan).documents_per_hour for plan in (shared, alone)]
        assert (per_hour[0] > per_hour[1]) == (count > 1)


def test_the_error_of_too_many_requests_says_how_many_would_fit() -> None:
    planner = planner_on(SEVEN, "1x4090", "retrieval")
    with pytest.raises(InsufficientMemoryError) as error:
        planner.plan(4_000, NEW, 1_000)
    hint = re.search(r"With `concurrency` (\d+) it would fit.", str(error.value))
    assert hint is not None
    fitting = int(hint[1])
    assert fitting > 1
    planner.plan(4_000, NEW, fitting)
    with pytest.raises(InsufficientMemoryError, match=hint[0]):
        planner.plan(4_000, NEW, fitting + 1)


def test_concurrent_requests_keep_the_budget_of_one_alone() -> None:
    """Several would take a smaller one."""
    planner = planner_on(SEVEN, "1xA100-80", "hierarchical", retrieval_budget=None)
    alone, eight = planner.plan(3_584, 512), planner.plan(3_584, 512, 8)
    assert eight.memory.placement == alone.memory.placement
    assert eight.requirements.strategy.budget < alone.requirements.strategy.budget
    shared = planner.max_concurrent(alone, 8)
    assert shared.concurrency < 8
    assert shared.requirements.strategy == alone.requirements.strategy


def test_higher_acceptance_gives_longer_drafts_and_fewer_seconds() -> None:
    planner = planner_on(SEVEN, "1x4090", "hierarchical")
    plan = planner.plan(PROMPT, NEW)

    def with_rate(target: float, inner: float = 0.7) -> Forecast:
        return CostModel(planner.costs.hardware, Acceptance(target, inner)).forecast(plan)

    forecasts = [with_rate(rate) for rate in (0.5, 0.8, 0.95)]
    lengths = [result.num_draft_tokens for result in forecasts]
    times = [result.token_s for result in forecasts]
    assert lengths == sorted(set(lengths))
    assert times == sorted(times, reverse=True)
    assert with_rate(0.0, 0.0).tokens_per_verification == 1


def test_draft_model_acceptance_is_the_same_at_every_level() -> None:
    """`Acceptance.target` refers to a retrieval cache, which mode speculative does not have."""
    plan = planner_on(SEVEN, "1x4090", "speculative").plan(PROMPT, NEW)
    rates = [Acceptance(target, inner) for target, inner in ((0.9, 0.6), (0.5, 0.6), (0.9, 0.8))]
    target_rates = [acceptance.rate(plan) for acceptance in rates]
    assert target_rates == pytest.approx([0.6, 0.6, 0.8])


def test_a_request_that_fits_the_device_is_compute_bound() -> None:
    costs = CostModel(HardwareProfile.from_name("1xA100-80"))
    planner = Planner(requirements_of(SEVEN, "hierarchical", 1), costs)
    plan = planner.plan(16_384, NEW)
    assert plan.memory.resident_layers == SEVEN.layers
    assert plan.memory.host_bytes == 0
    for each in (plan, plain_of(planner, plan)):
        assert costs.forecast(each).verification_bound == "compute"


def test_plain_decoding_has_its_own_plan() -> None:
    """It uses the memory that the other mode needs for a retrieval cache."""
    planner = planner_on(SEVEN, "2x4090", "hierarchical", retrieval_budget=32_768)
    plan = planner.plan(PROMPT, NEW)
    plain = plain_of(planner, plan)
    assert planner.costs.forecast(plain) == forecast_on(SEVEN, "2x4090", "plain")
    assert plain.memory.resident_layers > plan.memory.resident_layers


def test_best_length_is_the_shortest_of_equal_ones() -> None:
    assert best_length(range(1, 65), 0.9, lambda n: 1.0)[0] == 64
    assert best_length(range(1, 65), 0.0, lambda n: 1.0) == (1, 1.0)
    assert best_length(range(7, 8), 0.5, lambda n: 1.0 + n)[0] == 7


def test_expected_tokens() -> None:
    assert expected_tokens(0.0, 8) == 1
    assert expected_tokens(1.0, 8) == 9
    assert expected_tokens(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)


def test_prefill_flops() -> None:
    config = ModelConfig.from_pretrained(Path(__file__).parents[3] / "demo" / "target")
    # only keys and values in the last layer
    weights = 5 * (4 * 256 * 256 + 3 * 256 * 768) + 2 * 256 * 256
    pairs = 5 * 4 * 64 * (1 + 2 + 3)
    assert prefill_flops(config, 3) == pytest.approx((2 * weights * 3, 4 * pairs))


@pytest.mark.parametrize("name", ["olmo2", "qwen3_5", "granite-mamba"])
def test_matmul_flops_are_two_per_weight(name: str) -> None:
    config = ModelConfig.from_hf(tiny_config(**OTHERS[name]))
    layers = random_model(config, TensorParallelGroup(), torch.float32).layers
    weights = sum(each.rows * each.columns for each in layers.modules() if isinstance(each, Matrix))
    assert matmul_flops(config) == 2 * weights


def test_forward_over_an_8_bit_retrieval_cache_uses_its_measured_rate() -> None:
    """By default an 8-bit element takes as long as a 16-bit one."""
    machine = replace(HardwareProfile.from_name("2x4090"), host_memory=256e9, kv_rate=5e11)
    requirements = requirements_of(SEVEN, "retrieval", int(machine.gpus))
    plan = Planner(requirements, CostModel(machine)).plan(PROMPT, NEW)
    kv = requirements.layout.bytes(requirements.strategy.budget)

    def forward_s(hardware: HardwareProfile, **options: Any) -> float:
        changed = replace(requirements, settings=replace(requirements.settings, **options))
        return retrieval_s(hardware, changed)

    def retrieval_s(hardware: HardwareProfile, changed: Requirements) -> float:
        spec = replace(plan.spec, requirements=changed)
        return CostModel(hardware).retrieval_s(replace(plan, spec=spec))

    assert forward_s(replace(machine, int8_rate=5e11)) == forward_s(machine)
    slower = forward_s(replace(machine, int8_rate=2.5e11)) - forward_s(machine)
    assert slower == pytest.approx(kv / 5e11, rel=0.01)
    slow = replace(machine, int8_rate=1e11)
    assert forward_s(slow, int8_retrieval=False) == forward_s(machine)
    # Layers with a window have no retrieval cache.
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    window = SlidingWindow(requirements.strategy.budget, frozenset(range(1, SEVEN.layers)))
    windowed = replace(SEVEN, sliding_window=window, windowed_rope=rope)
    one_layer = [
        retrieval_s(replace(machine, int8_rate=rate), replace(requirements, target=windowed))
        for rate in (2.5e11, 5e11)
    ]
    assert one_layer[0] - one_layer[1] == pytest.approx(kv / SEVEN.layers / 5e11, rel=0.01)
    # Arithmetic is the same as in 16 bits.
    serial = replace(machine, runs_ahead=False)
    machines = [replace(serial, int8_rate=rate) for rate in (1e11, 5e11)]
    one, three = (
        [retrieval_s(each, replace(requirements, draft=draft, mode=mode)) for each in machines]
        for draft, mode in ((None, "retrieval"), (SMALL, "hierarchical"))
    )
    assert one[0] - one[1] == pytest.approx(three[0] - three[1])


def test_an_8_bit_retrieval_cache_needs_about_half_the_memory() -> None:
    requirements = requirements_of(SEVEN, "retrieval", 2)
    whole = replace(requirements, settings=replace(requirements.settings, int8_retrieval=False))
    half, full = (
        RequestSpec(each, PROMPT, NEW).retrieval.layer_bytes(each.layout)
        for each in (requirements, whole)
    )
    assert 0.5 < half / full < 0.57
    in_host_memory = replace(requirements, copies=False)  # nothing is offloaded
    assert not RequestSpec(in_host_memory, PROMPT, NEW).retrieval.quantised
    in_float32 = replace(requirements, dtype=torch.float32)
    assert not RequestSpec(in_float32, PROMPT, NEW).retrieval.quantised
    explicit = replace(in_float32, settings=replace(requirements.settings, int8_retrieval=True))
    assert RequestSpec(explicit, PROMPT, NEW).retrieval.quantised


def test_deterministic_requests_verify_in_blocks_and_draft_as_usual() -> None:
    machine = replace(HardwareProfile.from_name("2x4090"), host_memory=256e9)
    requirements = requirements_of(SEVEN, "retrieval", int(machine.gpus))
    costs = CostModel(machine)
    plan = Planner(requirements, costs).plan(PROMPT, NEW)
    settings = replace(requirements.settings, deterministic=True)
    spec = replace(plan.spec, requirements=replace(requirements, settings=settings))
    one, other = (costs.round_cost(each) for each in (plan, replace(plan, spec=spec)))
    forwards = ForwardCost(machine, SEVEN, requirements.ranks, requirements.dtype)
    block_s = forwards.batch_invariant_seconds(17, PROMPT)
    selection_s = one.compute_s(16) - forwards.seconds(17, PROMPT)
    assert other.compute_s(16) - selection_s == pytest.approx(block_s)
    assert block_s > 1.5 * forwards.seconds(17, PROMPT)  # three blocks of rows
    assert (other.link_s, other.drafted_s) == (one.link_s, one.drafted_s)


def test_coupled_noise_is_predicted_to_reject_at_its_bound() -> None:
    """The bound applies to the rejection rate of each budget."""
    for budget in (1024, DEFAULT_RETRIEVAL_BUDGET, 32_768):
        requirements = requirements_of(SEVEN, "retrieval", 2, retrieval_budget=budget)
        costs = CostModel(HardwareProfile.from_name("2x4090"))
        plan = Planner(requirements, costs).plan(30_000, NEW)
        for independent, coupled in (
            (acceptance.rate(plan), other.rate(plan))
            for acceptance, other in (
                (Acceptance(0.9), Acceptance(0.9, is_coupled=True)),
                (Acceptance(1.0), Acceptance(1.0, is_coupled=True)),
            )
        ):
            assert 1 - coupled == pytest.approx(2 * (1 - independent) / (2 - independent))
    assert Acceptance(0.9, 0.5, is_coupled=True).draft_rate == pytest.approx(0.5 / 1.5)


def test_forward_over_high_bytes_uses_their_measured_rate() -> None:
    """By default a high byte, half of an element, takes half of its time."""
    machine = replace(HardwareProfile.from_name("2x4090"), host_memory=256e9, kv_rate=5e11)
    requirements = requirements_of(SEVEN, "split", int(machine.gpus))
    plan = Planner(requirements, CostModel(machine)).plan(PROMPT, NEW)
    kv = requirements.layout.bytes(PROMPT, plan.memory.split_layers)
    assert kv > 0

    def on_device_s(hardware: HardwareProfile) -> float:
        return CostModel(hardware).on_device_s(plan, 1)

    assert on_device_s(replace(machine, high_bits_rate=1e12)) == on_device_s(machine)
    slower = on_device_s(replace(machine, high_bits_rate=2.5e11)) - on_device_s(machine)
    assert slower == pytest.approx(1.5 * kv / 5e11, rel=0.01)
    compute_s = [
        CostModel(replace(machine, reconstruct_rate=rate)).round_cost(plan).compute_s(8)
        for rate in (1e11, 5e10)
    ]
    assert compute_s[1] - compute_s[0] == pytest.approx(kv / 1e11, rel=0.01)
