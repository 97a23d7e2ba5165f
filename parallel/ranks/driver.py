"""Diagnosis of GPUs that the driver finds but torch does not."""

from __future__ import annotations

import os

import pynvml
import torch

_INSTALL = (
    "pip install --force-reinstall 'torch>=2.11,<2.16' "
    "--index-url https://download.pytorch.org/whl/"
)
_HIDDEN = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide all GPUs


def unseen_gpus() -> str | None:
    """Return one line that says which GPUs torch cannot use, why, and what to do.

    None if torch sees a GPU, if the driver finds none, or if CUDA_VISIBLE_DEVICES hides all.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available() or hidden in _HIDDEN:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        count = pynvml.nvmlDeviceGetCount()
        names = [name for index in range(count) if (name := _name(index)) is not None]
        if not names:
            return None
        driver = pynvml.nvmlSystemGetDriverVersion()
        # NVML encodes CUDA 12.4 as 12040
        cuda = divmod(pynvml.nvmlSystemGetCudaDriverVersion_v2() // 10, 100)
    except pynvml.NVMLError:  # a broken driver: nvidia-smi reports the problem
        return None
    finally:
        pynvml.nvmlShutdown()
    gpus = f"{count} x {names[0]}" if count > 1 else names[0]
    return f"torch does not see the GPU here ({gpus}): {_reason(driver, cuda, hidden)}"


def _name(index: int) -> str | None:
    """Return a GPU's name, None if it does not respond because it is lost or broken."""
    try:
        return pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))
    except pynvml.NVMLError:
        return None


def _reason(driver: str, cuda: tuple[int, int], hidden: str | None) -> str:
    """Return why torch sees no GPU, and what to do.

    Args:
        driver: the driver's version.
        cuda: major and minor version of the newest CUDA the driver supports.
        hidden: the value of CUDA_VISIBLE_DEVICES, None if it is not set.
    """
    build = torch.version.cuda
    major, minor = cuda
    driver_version = f"driver {driver}, for CUDA {major}.{minor}"
    if build is None or int(build.split(".")[0]) > major:
        torch_build = f"a build for CUDA {build}" if build else "a build without CUDA"
        problem = f"torch {torch.__version__} is {torch_build}, found {driver_version}."
        if major < 12:
            return f"{problem} Install driver 580 or later."
        build_tag = "cu130" if major > 12 else "cu126"
        return f"{problem} Install the build that fits: {_INSTALL}{build_tag}"
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES is {hidden}, which names none of them: unset it."
    command = "python -c 'import torch; torch.cuda.init()'"
    return f"found {driver_version}. Run {command} to see the reason."
