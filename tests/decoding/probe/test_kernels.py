"""Rates measured on kernels alone, and the passes that are predicted from them."""

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
from decoding.probe.kernels import _Kernels, pass_rates
from decoding.speculation.draft_length import expected_tokens
from offload.errors import TierForceError
from offload.kernels.batch_invariant_shape import KEY_BLOCK, ROW_BLOCK
from offload.layout import ceil_div
from parallel.config.model_config import ModelConfig
from support.measuring import measure_briefly
from support.ranks import run_ranks

TARGET = ModelConfig.from_pretrained(Path(__file__).parents[3] / "demo" / "target")
CPU = torch.device("cpu")
# a machine of round numbers, on which everything adds up
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
        return pass_rates(TARGET, CPU, torch.float32)


def test_rates_are_numbers_of_a_hardware(rates: dict[str, float]) -> None:
    machine = replace(SERIAL, **rates)  # which refuses what is no number, or not above 0
    assert set(rates) <= {field.name for field in fields(HardwareProfile)}
    assert all(getattr(machine, name) == value for name, value in rates.items())


@pytest.mark.parametrize("name", ["memory_rate", "kv_rate", "score_rate"])
def test_bytes_a_second_are_of_a_memorys_magnitude(rates: dict[str, float], name: str) -> None:
    assert 1e7 < rates[name] < 1e13


def test_a_retrieval_cache_in_8_bits_is_not_measured_in_32_bits(rates: dict[str, float]) -> None:
    assert "score_rate" in rates
    assert "int8_rate" not in rates


@pytest.mark.slow
def test_a_retrieval_cache_in_8_bits_is_measured_where_there_is_one() -> None:
    torch.set_num_threads(1)
    in_16 = _Kernels(TARGET, torch.device("cpu"), torch.bfloat16).retrieval_rates()
    assert set(in_16) == {"score_rate", "int8_rate"}
    # some memory is read for it, and it is attention all the same
    kv_rate = _Kernels(TARGET, torch.device("cpu"), torch.bfloat16).attention_rates()["kv_rate"]
    assert kv_rate / 30 < in_16["int8_rate"] < 10 * kv_rate
    in_32 = _Kernels(TARGET, torch.device("cpu"), torch.float32).retrieval_rates()
    assert set(in_32) == {"score_rate"}


def test_a_pass_takes_its_memory_its_rows_and_its_launches() -> None:
    """Float32 weights and KV at 10 GB/s, 0.1 TFLOP/s, 100 microseconds a layer."""
    kv = TARGET.kv_layout(1, torch.float32).bytes(1000)
    one = seconds(SERIAL, 1, 1000)
    memory = (read_bytes(TARGET, 1, torch.float32, 1) + kv) / 1e10
    assert one == pytest.approx(memory + matmul_flops(TARGET) / 1e11 + 6e-4)
    nine = seconds(SERIAL, 9, 1000)
    assert nine - one == pytest.approx(
        8 * (matmul_flops(TARGET) + attention_flops(TARGET) * 1000) / 1e11
    )


def test_numbers_a_profile_has_are_taken_and_others_stand_in() -> None:
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
    assert selection_s(SERIAL, kv) == pytest.approx(0.05)  # keys are half of it
    assert selection_s(replace(SERIAL, score_rate=5e8), kv) == pytest.approx(2)


def test_a_steady_pass_takes_whole_blocks() -> None:
    """Of 8 rows and of 2,048 keys, and so many of them as lie between."""

    def steady_s(machine: HardwareProfile, rows: int, attended: int = 5000) -> float:
        return ForwardCost(machine, TARGET, 1, torch.float32).batch_invariant_seconds(
            rows, attended
        )

    block = seconds(SERIAL, ROW_BLOCK, 3 * KEY_BLOCK)
    assert steady_s(SERIAL, 1) == pytest.approx(block)
    # nine rows begin at any of eight places of a block
    mean = sum(ceil_div(place + 9, ROW_BLOCK) for place in range(ROW_BLOCK)) / ROW_BLOCK
    assert steady_s(SERIAL, 9) == pytest.approx(mean * block)
    pieces = TARGET.layers * TARGET.kv_heads * 3
    with_launches = steady_s(replace(SERIAL, chunk_s=1e-3), 1)
    assert with_launches - block == pytest.approx(pieces * 1e-3)
    drawn = replace(SERIAL, sample_s=1e-3, draw_s=1e-2)
    assert steady_s(drawn, 9) - steady_s(SERIAL, 9) == pytest.approx(9e-3 + 1e-2)
    # what a pass takes beside its layers comes once
    assert steady_s(replace(SERIAL, forward_s=0.1), 9) - steady_s(SERIAL, 9) == pytest.approx(0.1)


@pytest.mark.parametrize(("ranks", "sums"), [(1, 0), (2, 1), (4, 2)])
def test_blocks_of_rows_are_summed_up_at_once_where_there_is_one_order(
    ranks: int, sums: float
) -> None:
    passes = ForwardCost(replace(SERIAL, all_reduce_rate=1e29), TARGET, ranks, torch.float32)
    slow = ForwardCost(replace(passes.hardware, all_reduce_s=1e-3), TARGET, ranks, torch.float32)
    more = slow.batch_invariant_seconds(9, 5000) - passes.batch_invariant_seconds(9, 5000)
    assert more == pytest.approx(sums * 2 * TARGET.layers * 1e-3)


def test_a_block_of_keys_is_measured_unless_fused_kernels_take_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(1)
    measured = _Kernels(TARGET, CPU, torch.float32)
    assert 0 < measured.chunk_seconds({"kv_rate": 1e30}) < 1
    assert measured.chunk_seconds({"kv_rate": 1.0}) == 0  # reading is all that it takes
    monkeypatch.setattr(kernels, "batch_invariant_kernels", lambda *_: (kernels, ""))
    assert measured.chunk_seconds({"kv_rate": 1e30}) == 0


def test_a_steady_pass_reads_the_experts_of_each_row() -> None:
    mixture = ModelConfig.from_hf(
        Qwen3MoeConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4)
    )
    machine = replace(SERIAL, layer_s=0.0, matmul=1e29)
    passes = ForwardCost(machine, mixture, 1, torch.float32)
    others = read_bytes(mixture, 1, torch.float32, 0)
    one = read_bytes(mixture, 1, torch.float32, 1)
    kv = mixture.kv_layout(1, torch.float32).bytes(KEY_BLOCK)
    wanted = others + ROW_BLOCK * (one - others) + kv
    assert passes.batch_invariant_seconds(1, 100) == pytest.approx(wanted / machine.memory_rate)


def test_further_rows_take_what_was_measured_of_so_many() -> None:
    """A processor that takes another path from some number of rows on, and times between."""
    flops = matmul_flops(TARGET) + head_flops(TARGET, 1)
    machine = replace(SERIAL, matmul_3=1e10, matmul_5=1e9, matmul_33=4e9)
    one = seconds(machine, 1, 0)
    assert one == pytest.approx(seconds(SERIAL, 1, 0) - matmul_flops(TARGET) / 1e11)
    further = {rows: (seconds(machine, rows, 0) - one) / flops for rows in (2, 3, 4, 5, 19, 33, 65)}
    assert further == pytest.approx(
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
    # what was not measured is not needed
    assert seconds(replace(machine, matmul_3=None), 3, 0) - one == pytest.approx(2e-9 * flops)


def test_a_device_that_the_host_runs_ahead_of_waits_for_the_slowest_alone() -> None:
    ahead = replace(SERIAL, runs_ahead=True)
    assert seconds(ahead, 1, 10) == pytest.approx(
        read_bytes(TARGET, 1, torch.float32, 1) / 1e10, rel=0.1
    )
    assert seconds(replace(ahead, layer_s=1.0), 1, 10) == pytest.approx(6)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_runs_ahead_is_true_or_false(value: object) -> None:
    with pytest.raises(TierForceError, match="runs_ahead must be true or false"):
        HardwareProfile._of("mine", {**vars(SERIAL), "runs_ahead": value})


@pytest.mark.parametrize(
    "name", ["kv_rate", "attention", "prefill_attention", "score_rate", "sample_s"]
)
def test_absurd_numbers_are_refused(name: str) -> None:
    with pytest.raises(TierForceError, match=f"{name} must be a number of 0 or more, found -1"):
        HardwareProfile._of("mine", {**vars(SERIAL), name: -1})


def test_acceptance_is_found_back() -> None:
    for rate in (0.1, 0.7, 0.95):
        assert acceptance_of(expected_tokens(rate, 12), 12) == pytest.approx(rate, abs=1e-6)
    assert acceptance_of(13.0, 12) == pytest.approx(1.0)


def test_what_is_compared_differs_in_all_that_a_plan_depends_on() -> None:
    assert len(SETTINGS) >= 8
    for field in ("part", "mode", "rate", "resident", "budget", "draft"):
        assert len({getattr(setting, field) for setting in SETTINGS}) >= 3
