"""`tierforce probe`: a file for `tierforce plan`, and warnings about the machine."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch
from rich.console import Console

from decoding.app.hardware.probe_view import table
from decoding.planning.hardware_profile import HardwareProfile
from decoding.probe.advice import COPY_ENGINES, all_reduce_warnings, warnings
from decoding.probe.probe import profile
from decoding.probe.survey import Gpu, Machine, iommu_of
from offload.memory.bandwidth import BandwidthProbe
from offload.memory.cpu_link import EmulatedLink
from parallel.ranks.process_group import TensorParallelGroup
from support.commands import TARGET, forked, refused
from support.measuring import measure_briefly
from support.ranks import run_ranks

GPU = Gpu("RTX 4090", 25_757_220_864, 4, 4, 16, 16, 0, "0000:41:00.0", iommu="identity")
SECOND = replace(GPU, address="0000:01:00.0")
HOST = Machine([GPU, SECOND], "580.00", 16, 16, 120_000_000_000, None, False)


def test_plan_reads_a_probe_file(tmp_path: Path) -> None:
    path = tmp_path / "here" / "probe.json"
    command = ("probe", "--device", "cpu", "--model", str(TARGET), "--output", str(path))
    probed = forked(tmp_path, *command, before=measure_briefly)
    assert probed.code == 0, probed.err
    content = json.loads(path.read_text())
    assert content["machine"]["usable_cores"] >= 1
    assert all(
        "measured" in number["source"]
        for name, number in content.items()
        if name not in ("machine", "warnings", "runs_ahead")
    )
    assert content["runs_ahead"]["value"] is False
    machine = HardwareProfile.from_name(str(path))
    assert machine.gpus == 1
    assert machine.link_in > 0
    assert 0 <= machine.layer_s < 0.1  # a difference of short measurements, so maybe 0
    planned = forked(
        tmp_path,
        "plan",
        "--model",
        str(TARGET),
        "--hardware",
        str(path),
        "--context",
        "4096",
        "--json",
    )
    assert planned.code == 0, planned.err
    assert json.loads(planned.out)["job"]["hardware"] == "probe"


def test_unmeasured_numbers_are_left_out_of_the_table() -> None:
    source = {"value": 1.0, "source": "measured"}
    output = StringIO()
    Console(width=100, file=output).print(table({"gpus": source, "link_in": source}, "cpu"))
    assert "host to GPU, all links busy" in output.getvalue()
    assert "attention" not in output.getvalue()


def test_an_unwritable_output_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = forked(
        tmp_path,
        "probe",
        "--device",
        "cpu",
        "--model",
        str(TARGET),
        "--output",
        str(tmp_path / "file" / "probe.json"),
        before=measure_briefly,
    )
    assert "cannot be written" in refused(done)


@pytest.mark.slow
def test_two_ranks_agree_on_the_numbers() -> None:
    first, second = run_ranks(2, on_a_rank)
    for content in (first, second):
        del content["machine"], content["warnings"]  # available memory varies
    assert first == second
    assert first["gpus"]["value"] == 2
    assert 0 < first["all_reduce_s"]["value"] < 1
    for name in ("all_reduce_rate", "shared_all_reduce_rate"):
        assert 1e6 < first[name]["value"] < 1e14
    assert all(1e6 < rate < 1e14 for rate in first["link_in_alone"]["of each"])
    assert len(first["link_in_alone"]["of each"]) == 2


def on_a_rank() -> dict[str, Any]:
    measure_briefly()
    return profile(TensorParallelGroup.from_environment("cpu"), str(TARGET))


def test_link_rate_is_measured() -> None:
    link = EmulatedLink(torch.device("cpu"), 2e8)
    copies = BandwidthProbe(link, size=4 << 20)
    for out in (False, True):
        # never faster than the link, but slower on a busy machine
        assert 6e7 < copies.rate(out, seconds=0.1) < 2.2e8
    assert copies.call_while_copying(lambda: 7) == 7
    copies.close()
    link.close()


def test_a_good_machine_has_no_warnings() -> None:
    assert warnings(HOST, HOST.gpus, 24e9, [25e9, 25e9]) == []


def test_gpus_of_ranks_are_found_by_pci_address() -> None:
    assert HOST.gpu_at(SECOND.address) is SECOND
    machine = replace(HOST, gpus=[replace(GPU, pcie_width=1), SECOND])
    # CUDA_VISIBLE_DEVICES=1
    assert warnings(machine, [machine.gpu_at(SECOND.address)], 24e9, [25e9]) == []
    assert (
        "GPU 0 (RTX 4090) uses 1 PCIe lanes"
        in warnings(machine, [machine.gpu_at(GPU.address)], 24e9, [25e9])[0]
    )
    (warning,) = warnings(HOST, [GPU, HOST.gpu_at("0000:99:00.0")], 24e9, [25e9, 25e9])
    assert "NVML reports no GPU 1 at 0000:99:00.0" in warning


@pytest.mark.parametrize(
    ("machine", "gpus", "words"),
    [
        (
            replace(HOST, gpus=[GPU, replace(GPU, pcie_width=8)]),
            2,
            "GPU 1 (RTX 4090) uses 8 PCIe lanes of at most 16",
        ),
        (
            replace(HOST, gpus=[replace(GPU, pcie_width=4, max_pcie_width=4)]),
            1,
            "would take 0.25 of the time",
        ),
        (
            replace(HOST, gpus=[replace(GPU, pcie_generation=1)]),
            1,
            "runs at PCIe 1.0 under load and supports 4.0",
        ),
        (
            replace(HOST, gpus=[replace(GPU, pcie_generation=3, max_pcie_generation=3)]),
            1,
            "supports only PCIe 3.0",
        ),
        (replace(HOST, gpus=[GPU, replace(GPU, numa_node=1)]), 2, "different NUMA nodes"),
        (
            replace(HOST, gpus=[GPU, replace(GPU, nearby=False)]),
            2,
            "GPU 1 (RTX 4090) is on NUMA node 0, where this process may not",
        ),
        (
            replace(HOST, gpus=[replace(GPU, iommu="DMA-FQ")]),
            1,
            "GPU 0 (RTX 4090) are translated by an IOMMU (DMA-FQ)",
        ),
        (replace(HOST, wsl=True), 2, "WSL2"),
        (HOST, 0, "no GPU is used"),
        (replace(HOST, memlock=8_000_000_000), 1, "only 8.0 GB may be locked"),
        (replace(HOST, host_available=30_000_000_000), 2, "30 GB of host memory are available"),
    ],
)
def test_expensive_problems_cause_a_warning(machine: Machine, gpus: int, words: str) -> None:
    (warning,) = warnings(machine, machine.gpus[:gpus], 25e9, [25e9] * max(1, gpus))
    assert words in warning


def test_links_that_share_lanes_cause_a_warning() -> None:
    (warning,) = warnings(HOST, HOST.gpus, 12e9, [25e9, 25e9])
    assert "the links reach 12.0 GB/s each when all are busy, and 25.0 GB/s alone" in warning


def test_slow_all_reduces_cause_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COPY_ENGINES, raising=False)
    (warning,) = all_reduce_warnings(HOST.gpus, 25e9, 1.9e9)
    assert "large all-reduces run at 1.9 GB/s and a link at 25.0 GB/s" in warning
    assert "NCCL_SHM_USE_CUDA_MEMCPY=1" in warning
    assert not all_reduce_warnings(HOST.gpus, 25e9, 12.5e9)
    assert not all_reduce_warnings(HOST.gpus[:1], 25e9, 1.9e9)
    monkeypatch.setenv(COPY_ENGINES, "1")
    assert not all_reduce_warnings(HOST.gpus, 25e9, 1.9e9)


def test_a_slow_link_causes_a_warning() -> None:
    (warning,) = warnings(HOST, HOST.gpus, 6e9, [25e9, 6e9])
    assert "GPU 1's link reaches 6.0 GB/s alone, another 25.0 GB/s" in warning


class FakeDriver:
    """The NVML functions that the probe calls."""

    NVMLError = pynvml.NVMLError
    NVML_DEVICE_MIG_ENABLE = pynvml.NVML_DEVICE_MIG_ENABLE
    NVML_P2P_CAPS_INDEX_READ, NVML_P2P_STATUS_OK = (
        pynvml.NVML_P2P_CAPS_INDEX_READ,
        pynvml.NVML_P2P_STATUS_OK,
    )

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "DeviceGetCount": 2,
            "SystemGetDriverVersion": b"580.00",
            "DeviceGetName": "RTX 4090",
        }
        answers |= {
            "DeviceGetCurrPcieLinkGeneration": 1,
            "DeviceGetMaxPcieLinkGeneration": 4,
            "DeviceGetMaxPcieLinkWidth": 16,
            "DeviceGetMigMode": [1, 1],
        }
        function = name.removeprefix("nvml")
        if function == "DeviceGetCurrPcieLinkWidth":
            return self._unknown
        if function == "DeviceGetMemoryInfo":
            return lambda _: type("Memory", (), {"total": GPU.memory, "free": GPU.free})
        if function == "DeviceGetUUID":
            return lambda index: f"GPU-{index}"
        if function == "DeviceGetHandleByIndex":
            return lambda index: index
        if function == "DeviceGetPciInfo":
            return lambda index: type(
                "Pci", (), {"busId": b"00000000:41:00.0" if index == 0 else b"00000000:C1:00.0"}
            )
        if function == "DeviceGetP2PStatus":  # the second has access to the first
            return lambda one, other, _: pynvml.NVML_P2P_STATUS_OK if (one, other) == (1, 0) else 1
        return lambda *_: answers.get(function)

    def _unknown(self, _: Any) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install a driver with two GPUs; return the PCI addresses of NUMA queries."""
    addresses: list[str] = []
    monkeypatch.setattr("decoding.probe.survey.pynvml", FakeDriver())
    monkeypatch.setattr(
        "decoding.probe.survey.node_of", lambda address: addresses.append(address) or 1
    )
    monkeypatch.setattr("decoding.probe.survey.cpus_of", lambda node: {10_000} if node else set())
    monkeypatch.setattr("decoding.probe.survey.iommu_of", {"0000:41:00.0": "DMA"}.get)
    return addresses


def test_gpus_are_those_of_the_driver(driver: list[str]) -> None:
    machine = Machine.detect()
    assert machine.gpus == [
        Gpu(
            "RTX 4090",
            GPU.memory,
            1,
            4,
            0,
            16,
            1,
            "0000:41:00.0",
            nearby=False,
            iommu="DMA",
            peers=(),
            uuid="GPU-0",
            is_divided=True,
        ),
        Gpu(
            "RTX 4090",
            GPU.memory,
            1,
            4,
            0,
            16,
            1,
            "0000:c1:00.0",
            nearby=False,
            iommu=None,
            peers=(0,),
            uuid="GPU-1",
            is_divided=True,
        ),
    ]
    assert (machine.driver, machine.has_problem) == ("580.00", False)
    assert "uuid" not in machine.as_dict()["gpus"][0]
    assert driver == ["0000:41:00.0", "0000:c1:00.0"]


def test_iommu_type_is_read_from_sysfs(tmp_path: Path) -> None:
    group = tmp_path / "bus/pci/devices/0000:01:00.0/iommu_group"
    group.mkdir(parents=True)
    (group / "type").write_text("DMA-FQ\n")
    assert [iommu_of(address, tmp_path) for address in ("0000:01:00.0", "0000:41:00.0")] == [
        "DMA-FQ",
        None,
    ]


@pytest.mark.parametrize("function", ["nvmlDeviceGetName", "nvmlDeviceGetHandleByIndex"])
def test_an_unresponsive_gpu_is_skipped(
    function: str, driver: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(FakeDriver(), function)

    def lost(_: object, index: int) -> Any:
        if index == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return original(index)

    monkeypatch.setattr(FakeDriver, function, lost, raising=False)
    machine = Machine.detect()
    assert [gpu.address for gpu in machine.gpus] == ["0000:c1:00.0"]
    assert "580.00, GPU 0 does not respond" in machine.driver
    assert machine.has_problem


@pytest.mark.parametrize("problem", ["LIBRARY_NOT_FOUND", "LIB_RM_VERSION_MISMATCH"])
def test_a_machine_without_a_driver_has_no_problem(
    problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{problem}"))

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    machine = Machine.detect()
    assert machine.driver.startswith("no GPU: ")
    assert machine.has_problem == (problem != "LIBRARY_NOT_FOUND")
