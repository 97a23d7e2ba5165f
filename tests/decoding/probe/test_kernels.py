"""Microbenchmark rates, and forwards predicted from them."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig

from bench.checks.predictions import SETTINGS, acceptance_of
from decoding.planning.forward_cost import (
    ForwardCost,
    attention_flops,
    head_flops,
    matmul_flops,
    read_bytes,
    selection_s,
)
from decoding.planning.hardware_profile import HardwareProfile
from decoding.probe import kernels
from decoding.probe.kernels import _Kernels, kernel_rates
from decoding.speculation.draft_length import expected_tokens
from offload.errors import TierForceError
from offload.kernels.batch_invariant_shape import KEY_BLOCK, ROW_BLOCK
from offload.layout import ceil_div
from parallel.config.model_config import ModelConfig
from parallel.config.parameter_count import active_share
from parallel.ranks.partition import LARGE_SUM_BYTES
from support.measuring import measure_briefly
from support.ranks import run_ranks

TARGET = ModelConfig.from_pretrained(Path(__file__).parents[3] / "demo" / "target")
CPU = torch.device("cpu")
# a machine with round numbers and no overlap
SERIAL = HardwareProfile(
    "serial", 1, 1e9, 1e9, 1e9, 1e9, 1e10, 1e11, 0.0, 1e9, 1e-4, runs_ahead=False
)


def seconds(machine: HardwareProfile, rows: int, attended: int) -> float:
    return ForwardCost(machine, TARGET, 1, torch.float32).seconds(rows, attended)


@pytest.fixture(scope="module")
def rates() -> dict[str, float]:
    return run_ranks(1, measured)[0]


def measured() -> dict[str, float]:
    torch.set_num_threads(1)
    measure_briefly()
    with torch.inference_mode():
        return kernel_rates(TARGET, CPU, torch.float32)


@pytest.mark.slow
def test_rates_are_fields_of_a_hardware_profile(rates: dict[str, float]) -> None:
    machine = replace(SERIAL, **rates)  # validates the numbers
    assert set(rates) <= {field.name for field in fields(HardwareProfile)}
    assert all(getattr(machine, name) == value for name, value in rates.items())


@pytest.mark.parametrize("name", ["memory_rate", "kv_rate", "score_rate"])
def test_byte_rates_are_plausible_for_memory(rates: dict[str, float], name: str) -> None:
    assert 1e7 < rates[name] < 1e13


def test_float32_has_no_8_bit_retrieval_rate(rates: dict[str, float]) -> None:
    assert "score_rate" in rates
    assert "int8_rate" not in rates


@pytest.mark.slow
def test_bfloat16_has_an_8_bit_retrieval_rate() -> None:
    torch.set_num_threads(1)
    in_16 = _Kernels(TARGET, torch.device("cpu"), torch.bfloat16).retrieval_rates()
    assert set(in_16) == {"score_rate", "int8_rate"}
    # a rate of the same order as attention to 16-bit KV
    kv_rate = _Kernels(TARGET, torch.device("cpu"), torch.bfloat16).attention_rates()["kv_rate"]
    assert kv_rate / 30 < in_16["int8_rate"] < 10 * kv_rate
    in_32 = _Kernels(TARGET, torch.device("cpu"), torch.float32).retrieval_rates()
    assert set(in_32) == {"score_rate"}


def test_forward_time_is_memory_flops_and_launches() -> None:
    """Float32 weights and KV at 10 GB/s, 0.1 TFLOP/s, 100 microseconds per layer."""
    kv = TARGET.kv_layout(1, torch.float32).bytes(1000)
    one = seconds(SERIAL, 1, 1000)
    memory = (read_bytes(TARGET, 1, torch.float32, 1) + kv) / 1e10
    assert one == pytest.approx(memory + matmul_flops(TARGET) / 1e11 + 6e-4)
    nine = seconds(SERIAL, 9, 1000)
    assert nine - one == pytest.approx(
        8 * (matmul_flops(TARGET) + attention_flops(TARGET, 1000)) / 1e11
    )


def test_missing_numbers_of_a_profile_have_defaults() -> None:
    base = seconds(SERIAL, 9, 50_000)
    for name, value in (
        ("kv_rate", 1e10),
        ("attention", 1e11),
        ("forward_s", 0.0),
        ("sample_s", 0.0),
        ("draw_s", 0.0),
    ):
        assert seconds(replace(SERIAL, **{name: value}), 9, 50_000) == pytest.approx(base)
    for name, value in (
        ("kv_rate", 1e9),
        ("attention", 1e10),
        ("forward_s", 0.1),
        ("sample_s", 0.1),
        ("draw_s", 0.1),
    ):
        assert seconds(replace(SERIAL, **{name: value}), 9, 50_000) > 1.2 * base
    kv = 1e9
    assert selection_s(SERIAL, kv) == pytest.approx(0.05)  # keys are half of the KV
    assert selection_s(replace(SERIAL, score_rate=5e8), kv) == pytest.approx(2)


def test_batch_invariant_forward_costs_whole_blocks() -> None:
    """Blocks of 8 rows and 2,048 keys, in the mean over all alignments."""

    def batch_invariant_s(machine: HardwareProfile, rows: int, attended: int = 5000) -> float:
        return ForwardCost(machine, TARGET, 1, torch.float32).batch_invariant_seconds(
            rows, attended
        )

    block = seconds(SERIAL, ROW_BLOCK, 3 * KEY_BLOCK)
    assert batch_invariant_s(SERIAL, 1) == pytest.approx(block)
    # nine rows can start at any of eight positions of a block
    mean = sum(ceil_div(start + 9, ROW_BLOCK) for start in range(ROW_BLOCK)) / ROW_BLOCK
    assert batch_invariant_s(SERIAL, 9) == pytest.approx(mean * block)
    key_blocks = TARGET.layers * TARGET.kv_heads * 3
    with_launches = batch_invariant_s(replace(SERIAL, chunk_s=1e-3), 1)
    assert with_launches - block == pytest.approx(key_blocks * 1e-3)
    sampling = replace(SERIAL, sample_s=1e-3, draw_s=1e-2)
    assert batch_invariant_s(sampling, 9) - batch_invariant_s(SERIAL, 9) == pytest.approx(
        9e-3 + 1e-2
    )
    # The overhead of a forward is counted once.
    assert batch_invariant_s(replace(SERIAL, forward_s=0.1), 9) - batch_invariant_s(
        SERIAL, 9
    ) == pytest.approx(0.1)


@pytest.mark.parametrize(("ranks", "all_reduces"), [(1, 0), (2, 1), (4, 2)])
def test_up_to_two_ranks_all_reduce_all_blocks_at_once(ranks: int, all_reduces: float) -> None:
    fast = ForwardCost(replace(SERIAL, all_reduce_rate=1e29), TARGET, ranks, torch.float32)
    slow = ForwardCost(replace(fast.hardware, all_reduce_s=1e-3), TARGET, ranks, torch.float32)
    latency_s = slow.batch_invariant_seconds(9, 5000) - fast.batch_invariant_seconds(9, 5000)
    assert latency_s == pytest.approx(all_reduces * 2 * TARGET.layers * 1e-3)


@pytest.mark.parametrize(
    ("backend", "shared", "large"), [(1e9, 4e9, 4e9), (4e9, 1e9, 4e9), (1e9, None, 1e9)]
)
def test_large_all_reduces_use_the_faster_path(
    backend: float, shared: float | None, large: float
) -> None:
    hardware = replace(SERIAL, all_reduce_rate=backend, shared_all_reduce_rate=shared)
    without = replace(SERIAL, all_reduce_rate=1e29)
    costs = [ForwardCost(each, TARGET, 2, torch.float32) for each in (hardware, without)]
    token = TARGET.hidden * 4
    tokens = LARGE_SUM_BYTES // token
    for count, rate in ((tokens, large), (tokens - 1, backend)):
        seconds = [cost.seconds(count, 5000) for cost in costs]
        expected = 2 * TARGET.layers * count * token / rate
        assert seconds[0] - seconds[1] == pytest.approx(expected)


def test_key_block_overhead_is_measured_without_fused_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(1)
    benchmark = _Kernels(TARGET, CPU, torch.float32)
    assert 0 < benchmark.chunk_seconds({"kv_rate": 1e30}) < 1
    assert benchmark.chunk_seconds({"kv_rate": 1.0}) == 0  # all of the time is reading
    monkeypatch.setattr(kernels, "batch_invariant_kernels", lambda *_: (kernels, ""))
    assert benchmark.chunk_seconds({"kv_rate": 1e30}) == 0


def test_batch_invariant_forward_reads_the_experts_of_each_row() -> None:
    moe = ModelConfig.from_hf(
        Qwen3MoeConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4)
    )
    machine = replace(SERIAL, layer_s=0.0, matmul=1e29)
    cost = ForwardCost(machine, moe, 1, torch.float32)
    shared = read_bytes(moe, 1, torch.float32, 0)
    one = read_bytes(moe, 1, torch.float32, active_share(moe, 1))
    kv = moe.kv_layout(1, torch.float32).bytes(KEY_BLOCK)
    expected = shared + ROW_BLOCK * (one - shared) + kv
    assert cost.batch_invariant_seconds(1, 100) == pytest.approx(expected / machine.memory_rate)


def test_extra_query_tokens_interpolate_measured_rates() -> None:
    """The processor switches algorithms at some number of rows."""
    flops = matmul_flops(TARGET) + head_flops(TARGET, 1)
    machine = replace(SERIAL, matmul_3=1e10, matmul_5=1e9, matmul_33=4e9)
    one = seconds(machine, 1, 0)
    assert one == pytest.approx(seconds(SERIAL, 1, 0) - matmul_flops(TARGET) / 1e11)
    extra = {rows: (seconds(machine, rows, 0) - one) / flops for rows in (2, 3, 4, 5, 19, 33, 65)}
    assert extra == pytest.approx(
        {
            2: 1e-10,
            3: 2e-10,
            4: (2e-10 + 4e-9) / 2,
            5: 4e-9,
            19: (4e-9 + 8e-9) / 2,
            33: 8e-9,
            65: 8e-9 + 32e-11,
        }
    )
    # missing rates are interpolated
    assert seconds(replace(machine, matmul_3=None), 3, 0) - one == pytest.approx(2e-9 * flops)


def test_overlapping_work_costs_only_its_maximum() -> None:
    overlapping = replace(SERIAL, runs_ahead=True, layer_s=0.0)
    memory_s = seconds(overlapping, 1, 10)
    read_s = read_bytes(TARGET, 1, torch.float32, 1) / 1e10
    assert memory_s == pytest.approx(read_s, rel=0.1)
    # small kernels run one after another
    assert seconds(replace(overlapping, layer_s=1.0), 1, 10) == pytest.approx(memory_s + 6)


def test_launches_bound_only_forwards_that_are_not_captured() -> None:
    machine = replace(SERIAL, runs_ahead=True)
    slow = replace(machine, eager_layer_s=2.0)
    cost = ForwardCost(slow, TARGET, 1, torch.float32)
    assert cost.seconds(1, 10) == pytest.approx(12)
    assert cost.seconds(1, 10, captured=True) == seconds(machine, 1, 10)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_runs_ahead_is_true_or_false(value: object) -> None:
    with pytest.raises(TierForceError, match="runs_ahead must be true or false"):
        HardwareProfile._from_content("mine", {**vars(SERIAL), "runs_ahead": value})


@pytest.mark.parametrize(
    "name", ["kv_rate", "attention", "prefill_attention", "score_rate", "sample_s"]
)
def test_negative_numbers_are_rejected(name: str) -> None:
    with pytest.raises(TierForceError, match=f"{name} must be a number of 0 or more, found -1"):
        HardwareProfile._from_content("mine", {**vars(SERIAL), name: -1})


def test_acceptance_is_recovered_from_expected_tokens() -> None:
    for rate in (0.1, 0.7, 0.95):
        assert acceptance_of(expected_tokens(rate, 12), 12) == pytest.approx(rate, abs=1e-6)
    assert acceptance_of(13.0, 12) == pytest.approx(1.0)


def test_compared_settings_differ_in_every_input_of_a_plan() -> None:
    assert len(SETTINGS) >= 8
    for field in ("part", "mode", "rate", "resident", "budget", "draft"):
        assert len({getattr(setting, field) for setting in SETTINGS}) >= 3
