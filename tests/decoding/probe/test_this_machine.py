"""The machine that a plan is for if none is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decoding.planning.hardware_profile import HardwareProfile, Trust
from decoding.probe.survey import Gpu, Machine
from decoding.probe.this_machine import PlannedMachine, gpu_counts, this_machine, visible_gpus
from offload.errors import TierForceError

NAME = "NVIDIA GeForce RTX 4090"
GPU = Gpu(
    NAME,
    25_756_000_000,
    4,
    4,
    16,
    16,
    None,
    "0000:01:00.0",
    free=25_400_000_000,
    uuid="GPU-11111111-aaaa",
)
SECOND = replace(GPU, address="0000:02:00.0", uuid="GPU-22222222-bbbb")
OTHER = replace(GPU, name="NVIDIA GeForce RTX 3060", memory=12_000_000_000, free=11_000_000_000)
HOST = 60_000_000_000


@pytest.fixture(autouse=True)
def all_gpus_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


def machines(
    monkeypatch: pytest.MonkeyPatch,
    *gpus: Gpu,
    count: int | None = None,
    cores: int = 8,
    problem: str = "",
) -> list[PlannedMachine]:
    machine = Machine(
        list(gpus), problem or "575.1", 16, cores, HOST, None, False, has_problem=bool(problem)
    )
    monkeypatch.setattr(Machine, "detect", lambda: machine)
    return this_machine(count)


def detect(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu, **options: Any) -> PlannedMachine:
    """Return the machine with all of its GPUs."""
    return machines(monkeypatch, *gpus, **options)[-1]


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
    assert busy.notes[0].startswith("GPU 0000:01:00.0: 15.8 of 25.8 GB are in use")


def test_plans_choose_between_numbers_of_gpus_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [gpu_counts(gpus) for gpus in (1, 2, 3, 4, 6, 8)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
    ]
    one, two = machines(monkeypatch, OTHER, GPU, replace(SECOND, free=20_000_000_000))
    assert (one.profile.gpus, two.profile.gpus) == (1, 2)
    assert one.profile.device_memory == 24.9e9
    assert two.profile.device_memory == 19.5e9
    assert two.profile.name == f"this machine (2 x {NAME}, at least 20.0 GB free)"
    assert two.profile.all_reduce_rate == HardwareProfile.from_name("2x4090").all_reduce_rate
    assert one.environment == "CUDA_VISIBLE_DEVICES=GPU-11111111"
    assert two.environment == "CUDA_VISIBLE_DEVICES=GPU-11111111,GPU-22222222"
    (chosen,) = machines(monkeypatch, GPU, SECOND, OTHER, count=2)
    assert chosen.profile.gpus == 2
    with pytest.raises(TierForceError, match=f"--gpus 3, but this machine has 2 x {NAME}: plan"):
        machines(monkeypatch, GPU, SECOND, OTHER, count=3)


def test_gpus_in_use_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    full, fuller = (replace(GPU, free=free, uuid=f"GPU-{free}") for free in (3 * 10**9, 2 * 10**9))
    third = replace(SECOND, uuid="GPU-33333333")
    found = machines(monkeypatch, fuller, SECOND, full, third)
    assert [each.profile.device_memory for each in found] == [24.9e9, 24.9e9, 1.5e9]
    assert [each.environment for each in found] == [
        "CUDA_VISIBLE_DEVICES=GPU-22222222",
        "CUDA_VISIBLE_DEVICES=GPU-22222222,GPU-33333333",
        "",
    ]
    three = detect(monkeypatch, fuller, SECOND, full, third, count=3)
    assert three.environment == "CUDA_VISIBLE_DEVICES=GPU-22222222,GPU-30000000,GPU-33333333"
    assert not detect(monkeypatch, SECOND, fuller, count=1).environment


@pytest.mark.parametrize(
    ("generation", "width", "rate"), [(4, 8, 12.6e9), (3, 16, 12.6e9), (4, 16, 25e9), (0, 0, 25e9)]
)
def test_a_narrow_slot_is_noticed(
    generation: int, width: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = replace(GPU, max_pcie_generation=generation, max_pcie_width=width)
    found = detect(monkeypatch, GPU, slot)
    assert found.profile.link_in == pytest.approx(rate, rel=1e-3)
    assert found.profile.shared_all_reduce_rate == pytest.approx(rate / 2, rel=1e-3)
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
        ("+1", [1]),
        ("9" * 5000, []),
        ("0,0", []),
        ("0,,1", [0]),
        (",0", []),
        ("0,GPU-b2", [0]),
        ("GPU-c3,GPU-a1", [2, 0]),
        ("GPU-c3,0,GPU-a1", [2]),
        ("GPU-c3,GPU-c3d4", []),
        ("GPU-,0", []),  # all three begin so
        ("none", []),
    ],
)
def test_visible_gpus(setting: str | None, indices: list[int]) -> None:
    uuids = ("GPU-a1b2", "GPU-b2c3", "GPU-c3d4")
    gpus = [replace(GPU, address=str(index), uuid=uuid) for index, uuid in enumerate(uuids)]
    assert [int(gpu.address) for gpu in visible_gpus(gpus, setting)] == indices


def test_gpus_that_cannot_be_planned_for_are_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(detect(monkeypatch).notes) == 1
    mismatch = "no GPU: Driver/library version mismatch"
    assert (
        detect(monkeypatch, problem=mismatch).notes[0]
        == f"NVIDIA's driver has a problem ({mismatch})."
    )
    lost = "575.1, GPU 1 does not respond: GPU is lost"
    assert (
        detect(monkeypatch, GPU, problem=lost).notes[0]
        == f"NVIDIA's driver has a problem ({lost})."
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = detect(monkeypatch, GPU)
    assert not hidden.profile.runs_ahead
    assert hidden.notes[0] == "CUDA_VISIBLE_DEVICES='' hides the machine's GPUs (1)."


def test_indices_of_unequal_gpus_may_be_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    note = "CUDA_VISIBLE_DEVICES may count GPUs of several kinds in another order"
    assert detect(monkeypatch, GPU, OTHER).notes[0].startswith(note)
    assert not detect(monkeypatch, GPU, SECOND).notes[0].startswith(note)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert not detect(monkeypatch, GPU, OTHER).notes[0].startswith(note)


@pytest.mark.parametrize("setting", ["MIG-12345678", None])
def test_instances_of_divided_gpus_are_refused(
    setting: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    divided = replace(GPU, is_divided=setting is None)
    with pytest.raises(TierForceError, match=r"is divided into instances \(MIG\)"):
        detect(monkeypatch, GPU, divided)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert detect(monkeypatch, GPU, divided).profile.gpus == 1
