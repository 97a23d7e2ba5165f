"""GPUs that the driver knows and torch does not are told, with what to install."""

from __future__ import annotations

import warnings

import pynvml
import pytest
import torch

from offload.errors import TierForceError
from parallel.ranks.driver import unseen_gpus
from parallel.ranks.process_group import TensorParallelGroup

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
INSTALL = "--index-url https://download.pytorch.org/whl/"


def driver(monkeypatch: pytest.MonkeyPatch, cuda: int, gpus: int = 1) -> None:
    """Let NVML know of GPUs, and of a driver for this version of CUDA."""
    said = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: gpus,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: "NVIDIA GeForce RTX 4090",
        "nvmlSystemGetDriverVersion": lambda: "550.54",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: cuda,
    }
    for name, answer in said.items():
        monkeypatch.setattr(pynvml, name, answer)


@pytest.mark.parametrize(
    ("build", "cuda", "wanted"),
    [
        (
            None,
            12040,
            f"a build without CUDA, found driver 550.54, for CUDA 12.4. .*{INSTALL}cu126",
        ),
        (
            "13.0",
            12040,
            f"a build for CUDA 13.0, found driver 550.54, for CUDA 12.4.*{INSTALL}cu126",
        ),
        (None, 13010, f"a build without CUDA, found driver 550.54, for CUDA 13.1.*{INSTALL}cu130"),
        ("12.6", 11080, "a build for CUDA 12.6, .* for CUDA 11.8. Install driver 580 or later"),
        ("12.8", 12040, "found driver 550.54, for CUDA 12.4. Run python -c"),
    ],
)
def test_a_build_that_does_not_fit_the_driver(
    build: str | None, cuda: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(monkeypatch, cuda)
    monkeypatch.setattr(torch.version, "cuda", build)
    with pytest.warns(match=wanted):
        group = TensorParallelGroup.from_environment()
    assert group.device.type == "cpu"
    said: list[str] = []
    TensorParallelGroup.from_environment("auto", said.append)
    assert len(said) == 1
    assert "\n" not in said[0]
    assert "(NVIDIA GeForce RTX 4090)" in said[0]
    with pytest.raises(TierForceError, match=wanted):
        TensorParallelGroup.from_environment("cuda")


def test_gpus_that_a_variable_names_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, 13000, gpus=2)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    line = unseen_gpus()
    assert line is not None
    assert "(2 x NVIDIA GeForce RTX 4090): CUDA_VISIBLE_DEVICES is 7, which names none" in line


def test_a_gpu_that_does_not_answer_silences_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, 13000, gpus=2)
    monkeypatch.setattr(torch.version, "cuda", None)
    lost = {0}

    def handle(index: int) -> int:
        if index in lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    assert "(2 x NVIDIA GeForce RTX 4090)" in str(unseen_gpus())
    lost.add(1)
    assert unseen_gpus() is None


def test_nothing_is_said_where_no_gpu_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TensorParallelGroup.from_environment()  # of a machine without a driver
        driver(monkeypatch, 13000)
        TensorParallelGroup.from_environment("cpu")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        TensorParallelGroup.from_environment()
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        driver(monkeypatch, 13000, gpus=0)
        TensorParallelGroup.from_environment()
