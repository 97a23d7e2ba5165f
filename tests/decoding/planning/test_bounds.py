"""Models and machines of any size are planned at once, or refused: no number overflows."""

from __future__ import annotations

import json
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding import Settings
from decoding.app.hardware.plan import _needs, _prompt_tokens
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.memory_requirements import Requirements
from decoding.planning.what_if import plan_request
from offload.errors import InsufficientMemoryError, TierForceError
from parallel.config.model_config import ModelConfig
from support.engines import DEMO
from support.slow import slow_except

NUMBERS: dict[str, Any] = {
    "gpus": 1,
    "device_memory": 1e9,
    "host_memory": 1e12,
    "link_in": 1e9,
    "link_out": 1e9,
    "memory_rate": 1e10,
    "matmul": 1e11,
    "all_reduce_s": 0,
    "all_reduce_rate": 1e9,
    "layer_s": 0,
}


@pytest.mark.parametrize("field", [name for name in NUMBERS if name != "gpus"])
def test_the_slowest_and_the_fastest_machine_have_finite_plans(field: str) -> None:
    """Or none, where it does not fit."""
    config = ModelConfig.from_name(str(DEMO / "target"))
    needs = Requirements(config, None, "plain", Settings(), torch.bfloat16, 1, 1, True)
    for value in (1.0, 1e6, 1e30):
        numbers = NUMBERS | ({field: value} if value < 1e7 or field[-2:] != "_s" else {})
        with suppress(InsufficientMemoryError):
            ahead = plan_request(needs, HardwareProfile("a machine", **numbers), 16_000, 512)
            said = ahead.forecast.as_dict().values()
            assert all(isfinite(each) for each in said if isinstance(each, int | float))


@pytest.mark.parametrize("size", [1, 10**5, 10**12])
@pytest.mark.parametrize("family", slow_except(["llama", "smollm3", "qwen3_moe"], 2))
def test_a_model_of_any_size_is_planned_at_once(family: str, size: int, tmp_path: Path) -> None:
    """Or refused in one line: nothing overflows, and nothing goes through 10^12 layers."""
    fields = json.loads((DEMO / "target/config.json").read_text())
    fields |= {"model_type": family, "num_experts_per_tok": 1}
    fields |= {"num_experts": 4, "moe_intermediate_size": 64, "rope_parameters": None}
    path, machine = tmp_path / "config.json", HardwareProfile.from_name("1x4090")
    sizes = [name for name, each in fields.items() if type(each) is int and "_id" not in name]
    for name in (*sizes, "all of them"):
        changed = dict.fromkeys(sizes, size) if name not in sizes else {name: size}
        path.write_text(json.dumps(fields | changed))
        with suppress(TierForceError):
            needs = _needs(str(path), None, Settings(dtype="bfloat16"), 1)
            ahead = plan_request(needs, machine, _prompt_tokens(needs.target, None, 8), 8)
            assert ahead.forecast.document_s < 1e30
