"""`tierforce probe`: what it measures is read by `tierforce plan`; what it warns of is what there is."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch
from commands import TARGET, forked, refused
from rich.console import Console

from bench.ranks import run_ranks
from decoding.hardware import Hardware
from decoding.machine import Gpu, Machine, warnings
from decoding.probing import profile, table
from decoding.rates import Copies
from offload import EmulatedLink
from parallel import Group

FINE = Gpu("RTX 4090", 25_757_220_864, 4, 4, 16, 16, 0)
HOST = Machine([FINE, FINE], "580.00", 16, 16, 120_000_000_000, None, False)


def test_a_probe_can_be_planned_for(tmp_path: Path) -> None:
    path = tmp_path / "here" / "probe.json"
    done = forked(tmp_path, "probe", "--device", "cpu", "--model", str(TARGET), "--output", str(path))
    assert done.code == 0, done.err
    found = json.loads(path.read_text())
    assert found["machine"]["usable_cores"] >= 1
    assert all(
        "measured" in number["source"] for name, number in found.items() if name not in ("machine", "warnings", "runs_ahead")
    )
    assert found["runs_ahead"]["value"] is False
    machine = Hardware.find(str(path))
    assert machine.gpus == 1
    assert machine.link_in > 0
    assert 1e-7 < machine.layer_s < 0.1
    planned = forked(tmp_path, "plan", "--model", str(TARGET), "--hardware", str(path), "--context", "4096", "--json")
    assert planned.code == 0, planned.err
    assert json.loads(planned.out)["job"]["hardware"] == "probe"


def test_a_number_that_noise_left_out_is_left_out_of_the_table() -> None:
    source = {"value": 1.0, "source": "measured"}
    written = StringIO()
    Console(width=100, file=written).print(table({"gpus": source, "link_in": source}, "cpu"))
    assert "link_in" in written.getvalue()
    assert "attention" not in written.getvalue()


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = forked(tmp_path, "probe", "--device", "cpu", "--model", str(TARGET), "--output", str(tmp_path / "file" / "probe.json"))
    assert "cannot be written" in refused(done)


def test_two_ranks_agree_on_the_numbers() -> None:
    first, second = run_ranks(2, on_a_rank)
    for found in (first, second):
        del found["machine"], found["warnings"]  # memory that is available comes and goes
    assert first == second
    assert first["gpus"]["value"] == 2
    assert 0 < first["all_reduce_s"]["value"] < 1
    assert 1e6 < first["all_reduce_rate"]["value"] < 1e14


def on_a_rank() -> dict[str, Any]:
    return profile(Group.from_environment("cpu"), str(TARGET))


def test_the_rate_of_a_link_is_measured() -> None:
    link = EmulatedLink(torch.device("cpu"), 2e8)
    copies = Copies(link, size=4 << 20)
    for out in (False, True):
        assert 6e7 < copies.rate(out, seconds=0.1) < 2.2e8  # never faster than the link, and slower when the machine is busy
    assert copies.meanwhile(lambda: 7) == 7
    copies.close()
    link.close()


def test_a_good_machine_needs_no_warning() -> None:
    assert warnings(HOST, 2, 24e9, 25e9) == []


@pytest.mark.parametrize(
    ("machine", "gpus", "words"),
    [
        (replace(HOST, gpus=[FINE, replace(FINE, pcie_width=8)]), 2, "GPU 1 (RTX 4090) runs on 8 PCIe lanes, 16 at most"),
        (replace(HOST, gpus=[replace(FINE, pcie_width=4, pcie_width_most=4)]), 1, "would take 0.25 of the time"),
        (replace(HOST, gpus=[replace(FINE, pcie_generation=1)]), 1, "runs on PCIe 1 under load, and could on 4"),
        (replace(HOST, gpus=[replace(FINE, pcie_generation=3, pcie_generation_most=3)]), 1, "has PCIe 3 at most"),
        (replace(HOST, gpus=[FINE, replace(FINE, numa_node=1)]), 2, "different NUMA nodes"),
        (replace(HOST, wsl=True), 2, "WSL2"),
        (HOST, 0, "no GPU is used"),
        (replace(HOST, memlock=8_000_000_000), 1, "only 8.0 GB may be locked"),
        (replace(HOST, host_available=30_000_000_000), 2, "30 GB of host memory are available"),
    ],
)
def test_what_costs_most_is_warned_of(machine: Machine, gpus: int, words: str) -> None:
    (warning,) = warnings(machine, gpus, 25e9, 25e9)
    assert words in warning


def test_gpus_that_are_not_used_are_not_warned_of() -> None:
    assert warnings(replace(HOST, gpus=[FINE, replace(FINE, pcie_width=1, numa_node=1)]), 1, 25e9, 25e9) == []


def test_links_that_share_lanes_are_warned_of() -> None:
    (warning,) = warnings(HOST, 2, 12e9, 25e9)
    assert "all at once the GPUs get 12.0 GB/s each, one alone 25.0" in warning


class FakeDriver:
    """Of NVML, what the probe asks."""

    NVMLError = pynvml.NVMLError

    def __getattr__(self, name: str) -> Any:
        answers = {"DeviceGetCount": 1, "SystemGetDriverVersion": b"580.00", "DeviceGetName": "RTX 4090"}
        answers |= {"DeviceGetCurrPcieLinkGeneration": 1, "DeviceGetMaxPcieLinkGeneration": 4, "DeviceGetMaxPcieLinkWidth": 16}
        asked = name.removeprefix("nvml")
        if asked == "DeviceGetCurrPcieLinkWidth":
            return self._unknown
        if asked == "DeviceGetMemoryInfo":
            return lambda _: type("Memory", (), {"total": FINE.memory})
        if asked == "DeviceGetPciInfo":
            return lambda _: type("Pci", (), {"busId": b"00000000:41:00.0"})
        return lambda *_: answers.get(asked)

    def _unknown(self, _: Any) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A driver with one GPU; the PCI addresses whose node was asked for."""
    asked: list[str] = []
    monkeypatch.setattr("decoding.machine.pynvml", FakeDriver())
    monkeypatch.setattr("decoding.machine.node_of", lambda address: asked.append(address) or 1)
    return asked


def test_gpus_are_what_the_driver_says(driver: list[str]) -> None:
    machine = Machine.here()
    assert machine.gpus == [Gpu("RTX 4090", FINE.memory, 1, 4, 0, 16, 1)]
    assert machine.driver == "580.00"
    assert driver == ["0000:41:00.0"]


def test_a_gpu_that_does_not_answer_ends_nothing(driver: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(FakeDriver, "nvmlDeviceGetName", lost, raising=False)
    machine = Machine.here()
    assert machine.gpus == []
    assert "580.00, GPU 0 does not answer" in machine.driver
