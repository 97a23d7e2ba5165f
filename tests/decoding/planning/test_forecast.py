"""Predictions: published rows from hardware numbers alone, and the arithmetic they are made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.dimensions import LLAMA_7B, LLAMA_13B, LLAMA_68M, config_of
from decoding import Settings
from decoding.config.defaults import DEFAULT_RETRIEVAL_BUDGET
from decoding.planning.cost import Acceptance, PredictedCosts
from decoding.planning.forecast import Forecast, forecast
from decoding.planning.forward_cost import prefill_flops, target_cost
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.memory_requirements import Requirements
from decoding.planning.what_if import PlanReport, plan_concurrent, plan_plain, plan_request
from decoding.speculation.draft_length import best_length, expected_tokens
from parallel.config.model_config import ModelConfig

PROMPT, NEW = 130_048, 512
SEVEN, THIRTEEN, SMALL = (config_of(each) for each in (LLAMA_7B, LLAMA_13B, LLAMA_68M))


def requirements_of(target: ModelConfig, mode: str, ranks: int, **choices: Any) -> Requirements:
    settings = Settings(mode=mode, **{"retrieval_budget": DEFAULT_RETRIEVAL_BUDGET, **choices})
    draft = SMALL if mode == "hierarchical" else None
    return Requirements(target, draft, mode, settings, torch.float16, ranks, 1, True)


def predicted(target: ModelConfig, hardware: str, mode: str, **choices: Any) -> PlanReport:
    """The 13B's KV takes more host memory than a profile assumes; layers that are set are taken as
    set.
    """
    machine = replace(HardwareProfile.from_name(hardware), host_memory=256e9)
    if "gpu_kv_layers" in choices:
        machine = replace(machine, device_memory=48e9)
    requirements = requirements_of(target, mode, int(machine.gpus), **choices)
    return plan_request(requirements, machine, PROMPT, NEW)


def test_published_plain_offload_of_the_7b() -> None:
    """840 ms a token on two 4090s with 12 resident layers (TriForce, arXiv 2404.11912, table 2)."""
    seen = predicted(SEVEN, "2x4090", "plain", gpu_kv_layers=12).forecast
    assert seen.token_s == pytest.approx(0.840, rel=0.05)
    assert seen.verification_bound == "link"


def test_published_plain_offload_of_the_13b_implies_its_resident_layers() -> None:
    """1794 ms a token: of 0 to 10 resident layers, 6 come nearest."""
    times = {
        count: predicted(THIRTEEN, "2x4090", "plain", gpu_kv_layers=count).forecast.token_s
        for count in range(11)
    }
    assert min(times, key=lambda count: abs(times[count] - 1.794)) == 6
    assert times[6] == pytest.approx(1.794, rel=0.05)


@pytest.mark.parametrize(
    ("target", "hardware", "published"),
    [(SEVEN, "2x4090", 0.108), (THIRTEEN, "2x4090", 0.226), (SEVEN, "1x4090", 0.312)],
)
def test_published_hierarchical_rows(target: ModelConfig, hardware: str, published: float) -> None:
    """With one acceptance rate for all three, the one that the first row implies."""
    seen = predicted(target, hardware, "hierarchical").forecast
    assert seen.token_s == pytest.approx(published, rel=0.25)
    assert seen.verification_bound == "link"


def test_texts_at_once_share_weights_and_launches_and_nothing_else() -> None:
    machine = replace(HardwareProfile.from_name("1xA100-80"), host_memory=256e9)
    plan, requirements = (
        predicted(SEVEN, "1xA100-80", "plain").plan,
        requirements_of(SEVEN, "plain", 1),
    )

    def of(texts: int, prompt: int = PROMPT) -> Forecast:
        return forecast(requirements, plan, machine, prompt, NEW, Acceptance(), texts)

    for texts in (2, 6):
        assert of(texts).link_s == pytest.approx(texts * of(1).link_s)
        assert of(1).compute_s < of(texts).compute_s < texts * of(1).compute_s
        assert of(texts).prefill_s == of(1).prefill_s
        share = of(texts).decode_s / texts
        assert of(texts).documents_per_hour == 3600 / (of(1).prefill_s + share)
    # where keys are few, reading the weights is all there is to share
    assert of(6, 100).compute_s < 1.5 * of(1, 100).compute_s


def test_published_gain_of_six_texts_at_once() -> None:
    """1.9 times plain decoding of the same six texts of 19K tokens, on one A100 (the paper,
    greedy); here with the acceptance that the first row of the table of offloading implies.
    """
    machine = replace(HardwareProfile.from_name("1xA100-80"), device_memory=128e9)
    seconds = {}
    for mode in ("plain", "hierarchical"):
        requirements = requirements_of(SEVEN, mode, 1, retrieval_budget=768, num_draft_tokens=6)
        seconds[mode] = plan_request(
            requirements, machine, 19_200, 256, concurrency=6
        ).forecast.token_s
    assert seconds["plain"] / seconds["hierarchical"] == pytest.approx(1.9, rel=0.2)


def test_as_many_go_together_as_keep_what_each_would_keep_alone() -> None:
    machine = HardwareProfile.from_name("1xA100-80")
    requirements = requirements_of(SEVEN, "plain", 1)
    for prompt in (2_000, 30_000, 100_000):
        alone = plan_request(requirements, machine, prompt, NEW)
        shared = plan_concurrent(requirements, alone, 8)
        count = shared.forecast.concurrency
        assert shared.plan == alone.plan
        assert shared.requirements == alone.requirements
        if count < 8:
            more = plan_request(requirements, machine, prompt, NEW, concurrency=count + 1)
            assert more.plan != alone.plan
        assert (count == 8, count == 1) == (prompt == 2_000, prompt == 100_000)
        better = shared.forecast.documents_per_hour > alone.forecast.documents_per_hour
        assert better == (count > 1)


def test_where_short_passes_are_recorded_large_layers_alone_are_worth_sharing() -> None:
    gpu = HardwareProfile.from_name("1xA100-80")
    cpu = replace(gpu, runs_ahead=False)  # where nothing is recorded
    small = replace(SEVEN, hidden=1024, intermediate=2048)

    def count(target: ModelConfig, mode: str, machine: HardwareProfile) -> int:
        requirements = requirements_of(target, mode, 1, retrieval_budget=512)
        alone = plan_request(requirements, machine, 2_000, 256)
        return plan_concurrent(requirements, alone, 4).forecast.concurrency

    assert count(SEVEN, "retrieval", gpu) == count(SEVEN, "hierarchical", gpu) == 4
    assert count(small, "retrieval", gpu) == 1
    assert count(small, "retrieval", cpu) == count(small, "plain", gpu) == 4


def test_more_acceptance_longer_drafts_fewer_seconds() -> None:
    report = predicted(SEVEN, "1x4090", "hierarchical")

    def with_rate(target: float, inner: float = 0.7) -> Forecast:
        acceptance = Acceptance(target, inner)
        return forecast(report.requirements, report.plan, report.hardware, PROMPT, NEW, acceptance)

    found = [with_rate(rate) for rate in (0.5, 0.8, 0.95)]
    lengths, times = [each.num_draft_tokens for each in found], [each.token_s for each in found]
    assert lengths == sorted(set(lengths))
    assert times == sorted(times, reverse=True)
    assert with_rate(0.0, 0.0).tokens_per_verification == 1


def test_what_a_draft_model_puts_before_the_target_stands_as_often_as_before_any_level() -> None:
    """The target's rate is that of a retrieval cache, which there is none of."""
    report = predicted(SEVEN, "1x4090", "speculative")
    rates = [Acceptance(target, inner) for target, inner in ((0.9, 0.6), (0.5, 0.6), (0.9, 0.8))]
    found = [rate.of(report.requirements, report.plan) for rate in rates]
    assert found == pytest.approx([0.6, 0.6, 0.8])


def test_a_text_that_fits_the_device_waits_for_no_link() -> None:
    requirements, machine = (
        requirements_of(SEVEN, "hierarchical", 1),
        HardwareProfile.from_name("1xA100-80"),
    )
    report = plan_request(requirements, machine, 16_384, NEW)
    assert report.plan.resident_layers == SEVEN.layers
    assert report.plan.host_bytes == 0
    without = plan_plain(report)
    assert without is not None
    bounds = (report.forecast.verification_bound, without.forecast.verification_bound)
    assert bounds == ("compute", "compute")


def test_plain_decoding_is_told_with_a_plan_of_its_own() -> None:
    """Memory that a retrieval cache takes is not missing in what it is compared with."""
    report = predicted(SEVEN, "2x4090", "hierarchical", retrieval_budget=32_768)
    without, alone = plan_plain(report), predicted(SEVEN, "2x4090", "plain")
    assert without is not None
    assert without.forecast == alone.forecast
    assert without.plan.resident_layers > report.plan.resident_layers


def test_the_best_length_is_the_shortest_of_the_best() -> None:
    assert best_length(range(1, 65), 0.9, lambda n: 1.0)[0] == 64
    assert best_length(range(1, 65), 0.0, lambda n: 1.0) == (1, 1.0)
    assert best_length(range(7, 8), 0.5, lambda n: 1.0 + n)[0] == 7


def test_expected_tokens() -> None:
    assert expected_tokens(0.0, 8) == 1
    assert expected_tokens(1.0, 8) == 9
    assert expected_tokens(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)


def test_arithmetic_of_a_prefill() -> None:
    config = ModelConfig.from_pretrained(Path(__file__).parents[3] / "demo" / "target")
    # of the last layer keys and values alone
    weights = 5 * (4 * 256 * 256 + 3 * 256 * 768) + 2 * 256 * 256
    pairs = 5 * 4 * 64 * (1 + 2 + 3)
    assert prefill_flops(config, 3) == pytest.approx((2 * weights * 3, 4 * pairs))


def test_a_pass_over_a_retrieval_cache_takes_what_was_measured_of_its_8_bits() -> None:
    """By default a byte of it takes as long as an element of 16 bits."""
    machine = replace(HardwareProfile.from_name("2x4090"), host_memory=256e9, kv_rate=5e11)
    requirements = requirements_of(SEVEN, "retrieval", int(machine.gpus))
    kv = requirements.layout.bytes(requirements.budget)

    def pass_s(hardware: HardwareProfile, **chosen: Any) -> float:
        settings = replace(requirements.settings, **chosen)
        costs = PredictedCosts(hardware, Acceptance())
        return costs.retrieval_s(replace(requirements, settings=settings), PROMPT)

    assert pass_s(replace(machine, int8_rate=5e11)) == pass_s(machine)
    slower = pass_s(replace(machine, int8_rate=2.5e11)) - pass_s(machine)
    assert slower == pytest.approx(kv / 5e11, rel=0.01)
    slow = replace(machine, int8_rate=1e11)
    assert pass_s(slow, int8_retrieval=False) == pass_s(machine)
    # arithmetic is what it is in 16 bits
    serial = replace(machine, runs_ahead=False)
    costs = [PredictedCosts(replace(serial, int8_rate=rate), Acceptance()) for rate in (1e11, 5e11)]
    one, three = (
        [each.retrieval_s(replace(requirements, draft=draft, mode=mode), PROMPT) for each in costs]
        for draft, mode in ((None, "retrieval"), (SMALL, "hierarchical"))
    )
    assert one[0] - one[1] == pytest.approx(three[0] - three[1])


def test_a_retrieval_cache_in_8_bits_takes_about_half_of_the_memory() -> None:
    requirements = requirements_of(SEVEN, "retrieval", 2)
    whole = replace(requirements, settings=replace(requirements.settings, int8_retrieval=False))
    half, all_of_it = (
        each.retrieval_spec(PROMPT, NEW).layer_bytes(each.layout) for each in (requirements, whole)
    )
    assert 0.5 < half / all_of_it < 0.57
    in_host_memory = replace(requirements, copies=False)  # where nothing has to leave the device
    assert not in_host_memory.retrieval_spec(PROMPT, NEW).quantised
    in_float32 = replace(requirements, dtype=torch.float32)
    assert not in_float32.retrieval_spec(PROMPT, NEW).quantised
    asked_for = replace(in_float32, settings=replace(requirements.settings, int8_retrieval=True))
    assert asked_for.retrieval_spec(PROMPT, NEW).quantised


def test_identical_texts_verify_in_blocks_and_draft_as_others_do() -> None:
    machine = replace(HardwareProfile.from_name("2x4090"), host_memory=256e9)
    requirements = requirements_of(SEVEN, "retrieval", int(machine.gpus))
    plan = plan_request(requirements, machine, PROMPT, NEW).plan
    deterministic = replace(
        requirements, settings=replace(requirements.settings, deterministic=True)
    )
    costs = PredictedCosts(machine, Acceptance())
    one, other = (costs.round_cost(each, plan, PROMPT) for each in (requirements, deterministic))
    steady = target_cost(machine, requirements).batch_invariant_seconds(17, PROMPT)
    selecting = one.compute_s(16) - target_cost(machine, requirements).seconds(17, PROMPT)
    assert other.compute_s(16) - selecting == pytest.approx(steady)
    assert steady > 1.5 * target_cost(machine, requirements).seconds(
        17, PROMPT
    )  # three blocks of rows
    assert (other.link_s, other.drafted_s) == (one.link_s, one.drafted_s)


def test_where_noise_is_shared_a_token_is_rejected_twice_as_often_at_most() -> None:
    """Whatever the budget: as often as it would be rejected with it, and what that comes to."""
    for budget in (1024, DEFAULT_RETRIEVAL_BUDGET, 32_768):
        requirements = requirements_of(SEVEN, "retrieval", 2, retrieval_budget=budget)
        plan = plan_request(requirements, HardwareProfile.from_name("2x4090"), 30_000, NEW).plan
        for seen, coupled in (
            (each.of(requirements, plan), other.of(requirements, plan))
            for each, other in (
                (Acceptance(0.9), Acceptance(0.9, is_coupled=True)),
                (Acceptance(1.0), Acceptance(1.0, is_coupled=True)),
            )
        ):
            assert 1 - coupled == pytest.approx(2 * (1 - seen) / (2 - seen))
    assert Acceptance(0.9, 0.5, is_coupled=True).drafted == pytest.approx(0.5 / 1.5)


def test_a_pass_over_codes_takes_what_was_measured_of_them() -> None:
    """By default a code, half of an element, takes half of its time."""
    machine = replace(HardwareProfile.from_name("2x4090"), host_memory=256e9, kv_rate=5e11)
    requirements = requirements_of(SEVEN, "split", int(machine.gpus))
    plan = plan_request(requirements, machine, PROMPT, NEW).plan
    kv = requirements.layout.bytes(PROMPT, plan.split_layers)
    assert kv > 0

    def near_s(hardware: HardwareProfile) -> float:
        return PredictedCosts(hardware, Acceptance()).on_device_s(requirements, plan, PROMPT, 1)

    assert near_s(replace(machine, high_bits_rate=1e12)) == near_s(machine)
    slower = near_s(replace(machine, high_bits_rate=2.5e11)) - near_s(machine)
    assert slower == pytest.approx(1.5 * kv / 5e11, rel=0.01)
    joined = [
        PredictedCosts(replace(machine, reconstruct_rate=rate), Acceptance())
        .round_cost(requirements, plan, PROMPT)
        .compute_s(8)
        for rate in (1e11, 5e10)
    ]
    assert joined[1] - joined[0] == pytest.approx(kv / 1e11, rel=0.01)


@pytest.mark.parametrize(
    ("machine", "wanted"), [("2x4090", None), ("1x5090", None), ("2x3090", False)]
)
def test_a_machine_without_room_for_what_is_written_out_keeps_16_bits(
    machine: str, wanted: bool | None
) -> None:
    assert HardwareProfile.from_name(machine).int8_retrieval is wanted
