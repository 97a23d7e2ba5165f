"""Predictions: published rows from hardware numbers alone, and the arithmetic they are made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.dimensions import LLAMA_7B, LLAMA_13B, LLAMA_68M, config_of
from decoding import Settings
from decoding.app.plan import outlook
from decoding.planning.forecast import (
    ACCEPTANCE,
    INNER_ACCEPTANCE,
    Forecast,
    expected_tokens,
    forecast,
    prefill_flops,
)
from decoding.planning.needs import Sizes
from decoding.planning.profile import Hardware
from parallel.config import ModelConfig

PROMPT, NEW = 130_048, 512
SEVEN, THIRTEEN, SMALL = (config_of(each) for each in (LLAMA_7B, LLAMA_13B, LLAMA_68M))


def predicted(
    target: ModelConfig, hardware: str, mode: str, **choices: Any
) -> tuple[Forecast, int]:
    """And the resident layers. The 13B's KV takes more host memory than a profile assumes; layers
    that are set are taken as set.
    """
    machine = replace(Hardware.find(hardware), host_memory=256e9)
    if "resident_layers" in choices:
        machine = replace(machine, device_memory=48e9)
    draft = SMALL if mode == "hierarchical" else None
    sizes = Sizes(
        target, draft, mode, Settings(mode=mode, **choices), torch.float16, machine.gpus, 1, True
    )
    plan, _ = outlook(sizes, machine, PROMPT, NEW)
    return (
        forecast(sizes, plan, machine, PROMPT, NEW, ACCEPTANCE, INNER_ACCEPTANCE),
        plan.resident_layers,
    )


def test_published_plain_offload_of_the_7b() -> None:
    """840 ms a token on two 4090s with 12 resident layers (TriForce, arXiv 2404.11912, table 2)."""
    seen, _ = predicted(SEVEN, "2x4090", "plain", resident_layers=12)
    assert seen.step_s == pytest.approx(0.840, rel=0.05)
    assert seen.step_bound == "link"


def test_published_plain_offload_of_the_13b_implies_its_resident_layers() -> None:
    """1794 ms a token: of 0 to 10 resident layers, 6 come nearest."""
    times = {
        count: predicted(THIRTEEN, "2x4090", "plain", resident_layers=count)[0].step_s
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
    seen, _ = predicted(target, hardware, "hierarchical")
    assert seen.token_s == pytest.approx(published, rel=0.25)
    assert seen.verification_bound == "link"


def test_more_acceptance_longer_drafts_fewer_seconds() -> None:
    machine, settings = Hardware.find("1x4090"), Settings(mode="hierarchical")
    sizes = Sizes(SEVEN, SMALL, "hierarchical", settings, torch.float16, 1, 1, True)
    plan, _ = outlook(sizes, machine, PROMPT, NEW)
    found = [forecast(sizes, plan, machine, PROMPT, NEW, rate, 0.7) for rate in (0.5, 0.8, 0.95)]
    lengths, times = [each.draft_length for each in found], [each.token_s for each in found]
    assert lengths == sorted(set(lengths))
    assert times == sorted(times, reverse=True)
    assert forecast(sizes, plan, machine, PROMPT, NEW, 0.0, 0.0).tokens_per_verification == 1


def test_a_text_that_fits_the_device_waits_for_no_link() -> None:
    sizes = Sizes(
        SEVEN, SMALL, "hierarchical", Settings(mode="hierarchical"), torch.float16, 1, 1, True
    )
    machine = Hardware.find("1xA100-80")
    plan, _ = outlook(sizes, machine, 16_384, NEW)
    assert plan.resident_layers == SEVEN.layers
    seen = forecast(sizes, plan, machine, 16_384, NEW, 0.9, 0.7)
    assert (seen.step_bound, seen.verification_bound, plan.host_bytes) == ("compute", "compute", 0)


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
