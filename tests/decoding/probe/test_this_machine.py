"""The machine that a plan is for if none is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decoding.planning.hardware_profile import HardwareProfile, Trust
from decoding.probe.survey import Gpu, Machine
from decoding.probe.this_machine import ThisMachine, visible_gpus
from offload.errors import TierForceError

NAME = "NVIDIA GeForce RTX 4090"
GPU = Gpu(NAME, 25_756_000_000, 4, 4, 16, 16, None, "0000:01:00.0", free=25_400_000_000)
OTHER = replace(GPU, name="NVIDIA GeForce RTX 3060", memory=12_000_000_000, free=11_000_000_000)
HOST = 60_000_000_000


@pytest.fixture(autouse=True)
def all_gpus_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def detect(
    monkeypatch: pytest.MonkeyPatch,
    *gpus: Gpu,
    count: int | None = None,
    max_gpus: int = 8,
    cores: int = 8,
) -> ThisMachine:
    machine = Machine(list(gpus), "575.1", 16, cores, HOST, None, False)
    monkeypatch.setattr(Machine, "detect", lambda: machine)
    return ThisMachine.detect(count, max_gpus)


def test_memory_is_what_is_free_now(monkeypatch: pytest.MonkeyPatch) -> None:
    found = detect(monkeypatch, GPU)
    assert found.profile == replace(
        HardwareProfile.from_name("1x4090"),
        name=f"this machine (1 x {NAME})",
        device_memory=24.9e9,
        host_memory=HOST,
    )
    assert [note.split(":")[0] for note in found.notes] == ["rates are those of the profile 1x4090"]
    assert found.trust is Trust.UNSPLIT
    busy = detect(monkeypatch, replace(GPU, free=10_000_000_000))
    assert busy.profile.device_memory == 9.5e9
    assert busy.notes[0].startswith("GPU 0: 15.8 of 25.8 GB are in use")


def test_all_gpus_of_a_kind_are_used_up_to_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    found = detect(monkeypatch, OTHER, GPU, replace(GPU, free=20_000_000_000))
    assert found.profile.gpus == 2
    assert found.profile.device_memory == 19.5e9
    assert found.profile.all_reduce_rate == HardwareProfile.from_name("2x4090").all_reduce_rate
    assert found.notes[:2] == [
        "the plan is for 2 GPUs: run with --gpus 2.",
        "the plan leaves out 1 of the GPUs.",
    ]
    assert detect(monkeypatch, GPU, GPU, max_gpus=1).profile.gpus == 1
    chosen = detect(monkeypatch, GPU, GPU, GPU, count=2)
    assert chosen.profile.gpus == 2
    assert chosen.notes[0] == "the plan leaves out 1 of the GPUs."
    with pytest.raises(TierForceError, match=f"--gpus 3, but this machine has 2 x {NAME}: plan"):
        detect(monkeypatch, GPU, GPU, OTHER, count=3)


@pytest.mark.parametrize(
    ("generation", "width", "rate"), [(4, 8, 12.6e9), (3, 16, 12.6e9), (4, 16, 25e9), (0, 0, 25e9)]
)
def test_a_narrow_slot_is_noticed(
    generation: int, width: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = replace(GPU, max_pcie_generation=generation, max_pcie_width=width)
    found = detect(monkeypatch, GPU, slot)
    assert found.profile.link_in == pytest.approx(rate, rel=1e-3)
    assert any("lanes" in note for note in found.notes) == (rate < 25e9)


def test_an_unknown_gpu_has_its_own_memory_and_link(monkeypatch: pytest.MonkeyPatch) -> None:
    found = detect(monkeypatch, replace(OTHER, max_pcie_generation=4, max_pcie_width=16))
    assert found.profile.memory_rate == HardwareProfile.from_name("1x4090").memory_rate
    assert found.profile.device_memory == 10.5e9
    assert found.profile.link_in == pytest.approx(25.2e9, rel=1e-3)
    assert "rates are assumed to be those of the profile 1x4090" in found.notes[0]


def test_a_cpu_is_not_called_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks share the memory and the cores."""
    one, many = detect(monkeypatch, cores=1), detect(monkeypatch, cores=8)
    assert one.profile.name == "this machine (1 core, no GPU)"
    assert many.profile.name == "this machine (8 cores, no GPU)"
    assert many.profile.matmul == pytest.approx(8 * one.profile.matmul)
    assert many.profile.memory_rate == one.profile.memory_rate
    assert many.profile.device_memory == HOST
    assert not many.profile.runs_ahead
    assert many.trust is Trust.NONE  # an engine assumes rates, too
    two = detect(monkeypatch, cores=8, count=2)
    assert (two.profile.gpus, two.profile.device_memory) == (2, HOST / 2)
    assert two.profile.matmul == pytest.approx(many.profile.matmul / 2)


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("1, 7, 0", [1]),
        ("GPU-a1,GPU-b2", [0, 1]),
        ("none", []),
    ],
)
def test_visible_gpus(setting: str | None, indices: list[int]) -> None:
    gpus = [replace(GPU, address=str(index)) for index in range(3)]
    assert [int(gpu.address) for gpu in visible_gpus(gpus, setting)] == indices


def test_hidden_gpus_are_not_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not detect(monkeypatch, GPU).profile.runs_ahead
