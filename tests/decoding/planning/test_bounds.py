"""Models and machines of any size are planned quickly or rejected; no number overflows."""

from __future__ import annotations

import json
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding import Settings
from decoding.app.hardware.model_on_machine import requirements_on
from decoding.app.hardware.plan import _prompt_tokens
from decoding.planning.cost_model import CostModel
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.requirements import Requirements
from offload.errors import InsufficientMemoryError, TierForceError
from parallel.config.model_config import ModelConfig
from support.engines import DEMO
from support.planning import plan_on
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
def test_extreme_machines_have_finite_plans_or_none(field: str) -> None:
    config = ModelConfig.from_name(str(DEMO / "target"))
    requirements = Requirements(config, None, "plain", Settings(), torch.bfloat16, 1, 1, True)
    for value in (1.0, 1e6, 1e30):
        numbers = NUMBERS | ({field: value} if value < 1e7 or field[-2:] != "_s" else {})
        with suppress(InsufficientMemoryError):
            machine = HardwareProfile("a machine", **numbers)
            plan = plan_on(machine, requirements, 16_000, 512)
            values = CostModel(machine).forecast(plan).as_dict().values()
            assert all(isfinite(value) for value in values if isinstance(value, int | float))


@pytest.mark.parametrize("size", [1, 10**5, 10**12])
@pytest.mark.parametrize("family", slow_except(["llama", "smollm3", "qwen3_moe"], 2))
def test_models_of_any_size_are_planned_or_rejected_quickly(
    family: str, size: int, tmp_path: Path
) -> None:
    """Nothing overflows or loops over 10^12 layers."""
    fields = json.loads((DEMO / "target/config.json").read_text())
    fields |= {"model_type": family, "num_experts_per_tok": 1}
    fields |= {"num_experts": 4, "moe_intermediate_size": 64, "rope_parameters": None}
    path, machine = tmp_path / "config.json", HardwareProfile.from_name("1x4090")
    sizes = [name for name, value in fields.items() if type(value) is int and "_id" not in name]
    for name in (*sizes, "all of them"):
        changed = dict.fromkeys(sizes, size) if name not in sizes else {name: size}
        path.write_text(json.dumps(fields | changed))
        with suppress(TierForceError):
            target = ModelConfig.from_name(str(path), packed=True)
            requirements = requirements_on(machine, target, None, Settings(dtype="bfloat16"))
            prompt = _prompt_tokens(requirements.target, None, 8)
            plan = plan_on(machine, requirements, prompt, 8)
            assert CostModel(machine).forecast(plan).document_s < 1e30
