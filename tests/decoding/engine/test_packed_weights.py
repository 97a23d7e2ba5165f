"""Engines with packed weights generate what those with the same weights in 16 bits do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
from gguf import GGMLQuantizationType as Kind

import decoding.models.loading
from decoding import GREEDY, Engine, Sampling, Settings
from decoding.app.terminal.messages import startup_line
from decoding.planning.forward_cost import ForwardCost, choose_weights
from decoding.planning.hardware_profile import ASSUMED_CPU, HardwareProfile
from decoding.planning.requirements import (
    Requirements,
    weight_bytes,
    weight_notes,
    whole_weight_bytes,
)
from offload.errors import TierForceError
from parallel.config.model_config import ModelConfig
from support.commands import DRAFT, TARGET
from support.gguf import convert
from support.models import random_tokens
from support.quantised import fp8, gptq, quantise
from support.slow import slow_except

NEW = 40
PROMPT = random_tokens(200).tolist()
LINK = {"link": "emulated:50", "gpu_kv_layers": 0}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {"mode": "plain"},
    "retrieval": {"mode": "retrieval", "retrieval_budget": 64, **LINK},
    "hierarchical": {"mode": "hierarchical", "retrieval_budget": 64, **LINK},
    "split": {"mode": "split", "split_kv_layers": 2, "dtype": "bfloat16", **LINK},
}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("packed")
    target = convert(TARGET, folder / "target.gguf", Kind.Q4_1)
    return target, convert(DRAFT, folder / "draft.gguf", Kind.Q8_0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Safetensors: a target of GPTQ with act-order, and a draft in FP8."""
    folder = tmp_path_factory.mktemp("groups")
    target, draft = folder / "target", folder / "draft"
    quantise(TARGET, target, GPTQ, gptq(permuted=True))
    quantise(DRAFT, draft, FP8, fp8((128, 128), torch.bfloat16, "weight_scale_inv"))
    return target, draft


@contextmanager
def engine_of(files: tuple[Path, Path], **settings: Any) -> Iterator[Engine]:
    draft = files[1] if "hierarchical" in settings["mode"] else None
    engine = Engine.from_pretrained(files[0], draft, settings=Settings(**settings), device="cpu")
    with closing(engine):
        yield engine


def tokens_of(files: tuple[Path, Path], sampling: Sampling, **settings: Any) -> list[int]:
    with engine_of(files, **settings) as engine:
        return list(engine.generate(PROMPT, NEW, sampling))


@pytest.mark.parametrize(
    ("dtype", "sampling"),
    slow_except(
        [
            ("float32", GREEDY),
            ("bfloat16", GREEDY),
            ("bfloat16", Sampling(0.8, top_p=0.9, seed=3)),
        ]
    ),
    ids=["float32", "bfloat16", "sampled"],
)
@pytest.mark.parametrize("name", slow_except(CONFIGURATIONS, 1))
def test_tokens_are_those_of_weights_in_16_bits(
    files: tuple[Path, Path], name: str, dtype: str, sampling: Sampling
) -> None:
    check_tokens(files, name, dtype, sampling)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retrieval", "hierarchical"])
def test_tokens_with_quantised_safetensors(folders: tuple[Path, Path], name: str) -> None:
    check_tokens(folders, name, "bfloat16", GREEDY)


def check_tokens(files: tuple[Path, Path], name: str, dtype: str, sampling: Sampling) -> None:
    settings = {"dtype": dtype} | CONFIGURATIONS[name]
    settings["deterministic"] = settings["dtype"] == "bfloat16"
    whole, packed = (
        tokens_of(files, sampling, weights=weights, **settings) for weights in ("16-bit", "packed")
    )
    assert packed == whole
    plain = {**settings, "mode": "plain", "weights": "packed"}
    for option in ("retrieval_budget", "split_kv_layers"):
        plain.pop(option, None)
    assert packed == tokens_of(files, sampling, **plain)


def test_a_startup_line_says_how_weights_are_stored(files: tuple[Path, Path]) -> None:
    with engine_of(files, mode="plain", weights="packed", dtype="bfloat16") as engine:
        needs = engine.runtime.requirements
        assert engine.runtime.weight_bytes == needs.weight_bytes
        assert needs.weight_bytes < 0.6 * whole_weight_bytes(needs)
        packed, whole = needs.weight_bytes / 1e9, whole_weight_bytes(needs) / 1e9
        words = f"; weights packed, {packed:.2f} GB ({whole:.2f} in bfloat16)"
        assert words in startup_line(engine, 0, None)
    with engine_of(files, mode="plain", dtype="bfloat16") as engine:  # faster on a CPU
        assert not engine.runtime.requirements.target.kept_types
        assert "packed" not in startup_line(engine, 0, None)


def test_weights_are_packed_where_16_bits_do_not_fit(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = decoding.models.loading._Machine.find
    whole = weight_bytes(ModelConfig.from_name(str(files[0])), 1, torch.bfloat16)

    def find_small(*args: Any) -> Any:
        return replace(find(*args), device_memory=1.9 * whole)

    monkeypatch.setattr(decoding.models.loading._Machine, "find", find_small)
    with engine_of(files, mode="hierarchical") as engine:
        assert engine.runtime.requirements.target.kept_types
        assert engine.runtime.draft is not None
        assert not engine.runtime.draft.config.kept_types  # it is small


def test_there_is_nothing_to_pack() -> None:
    with pytest.raises(TierForceError, match="no quantised matrices that can stay packed"):
        Engine.from_pretrained(TARGET, settings=Settings(mode="plain", weights="packed"))


def test_choice_of_weights(files: tuple[Path, Path]) -> None:
    config = ModelConfig.from_name(str(files[0]), packed=True)
    for profile, dtype, memory, packs in (
        ("1x4090", torch.bfloat16, 1e12, True),
        ("1x4090", torch.float32, 1e12, False),  # kernels are for 16 bits
        ("1x4090", torch.float32, 1e4, True),
        ("1xH200", torch.bfloat16, 1e12, False),  # reading 16 bits is faster
        ("1xH200", torch.bfloat16, 1e4, True),
    ):
        machine = HardwareProfile.from_name(profile)
        chosen = choose_weights(config, "auto", machine, dtype, memory)
        assert bool(chosen.kept_types) == packs, (profile, dtype, memory)
        assert not choose_weights(config, "16-bit", machine, dtype, memory).kept_types
        assert choose_weights(config, "packed", machine, dtype, memory) is config
    assert not choose_weights(config, "auto", ASSUMED_CPU, torch.bfloat16, 1e12).kept_types


def test_forwards_read_what_is_packed(files: tuple[Path, Path]) -> None:
    config = ModelConfig.from_name(str(files[0]), packed=True)
    whole = replace(config, kept_types=())
    machine = replace(HardwareProfile.from_name("1x4090"), memory_rate=1e6)  # reading is all

    def forward_s(config: ModelConfig, **numbers: Any) -> float:
        return ForwardCost(replace(machine, **numbers), config, 1, torch.half).seconds(1, 1)

    assert forward_s(config, packed_rate=1e12) < 0.5 * forward_s(whole)
    slow = forward_s(config, packed_rate=1e5)  # unpacking takes longer than reading
    assert slow > 3 * forward_s(whole)
    assert forward_s(config, packed_rate=1e5, runs_ahead=False) > slow + 0.9 * forward_s(whole)


def test_matrices_that_two_ranks_cut_are_noted(tmp_path: Path) -> None:
    path = convert(TARGET, tmp_path / "target.gguf", Kind.Q4_0)
    target = ModelConfig.from_name(str(path), packed=True)
    assert target.intermediate == 768
    for ranks, notes in ((1, 0), (2, 0), (16, 1)):
        settings = Settings(mode="plain")
        needs = Requirements(target, None, "plain", settings, torch.half, ranks, 1, True)
        assert len(weight_notes(needs)) == notes


def test_groups_in_another_order_are_not_packed_on_two_ranks(folders: tuple[Path, Path]) -> None:
    target = ModelConfig.from_name(str(folders[0]), packed=True)
    for ranks, notes in ((1, 0), (2, 1)):
        settings = Settings(mode="plain")
        needs = Requirements(target, None, "plain", settings, torch.half, ranks, 1, True)
        found = weight_notes(needs)
        assert len(found) == notes
        assert all("each GPU's columns of them hold parts of all groups" in note for note in found)
