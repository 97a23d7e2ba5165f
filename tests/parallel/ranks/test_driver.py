"""GPUs that the driver finds but torch does not are reported, with what to install."""

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
    """Make NVML report `gpus` GPUs, and a driver for this version of CUDA."""
    functions = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: gpus,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: "NVIDIA GeForce RTX 4090",
        "nvmlSystemGetDriverVersion": lambda: "550.54",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: cuda,
    }
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, name, function)


@pytest.mark.parametrize(
    ("build", "cuda", "expected"),
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
def test_torch_build_that_does_not_match_the_driver(
    build: str | None, cuda: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(monkeypatch, cuda)
    monkeypatch.setattr(torch.version, "cuda", build)
    with pytest.warns(match=expected):
        group = TensorParallelGroup.from_environment()
    assert group.device.type == "cpu"
    warned: list[str] = []
    TensorParallelGroup.from_environment("auto", warned.append)
    assert len(warned) == 1
    assert "\n" not in warned[0]
    assert "(NVIDIA GeForce RTX 4090)" in warned[0]
    with pytest.raises(TierForceError, match=expected):
        TensorParallelGroup.from_environment("cuda")


def test_cuda_visible_devices_names_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, 13000, gpus=2)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    line = unseen_gpus()
    assert line is not None
    assert "(2 x NVIDIA GeForce RTX 4090): CUDA_VISIBLE_DEVICES is 7, which names none" in line


def test_a_lost_gpu_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_no_warning_without_hidden_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TensorParallelGroup.from_environment()  # without a driver
        driver(monkeypatch, 13000)
        TensorParallelGroup.from_environment("cpu")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        TensorParallelGroup.from_environment()
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        driver(monkeypatch, 13000, gpus=0)
        TensorParallelGroup.from_environment()
