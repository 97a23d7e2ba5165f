"""GPUs that the driver knows and torch does not: why that is so, and what to install."""

from __future__ import annotations

import os

import pynvml
import torch

_INSTALL = (
    "pip install --force-reinstall 'torch>=2.11,<2.14' "
    "--index-url https://download.pytorch.org/whl/"
)
_HIDDEN = ("", "-1", "NoDevFiles")  # what CUDA_VISIBLE_DEVICES is set to in order to use no GPU


def unseen_gpus() -> str | None:
    """Say which GPUs torch cannot use, why, and what to do, in one line.

    None where torch sees a GPU, where the driver knows of none, and where CUDA_VISIBLE_DEVICES
    hides all of them.
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
        # 12040 is CUDA 12.4
        cuda = divmod(pynvml.nvmlSystemGetCudaDriverVersion_v2() // 10, 100)
    except pynvml.NVMLError:  # a driver that is not whole: nvidia-smi says what is wrong with it
        return None
    finally:
        pynvml.nvmlShutdown()
    named = f"{count} x {names[0]}" if count > 1 else names[0]
    return f"torch does not see the GPU here ({named}): {_reason(driver, cuda, hidden)}"


def _name(index: int) -> str | None:
    """Return a GPU's name, None where it does not answer: it is lost, or broken."""
    try:
        return pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))
    except pynvml.NVMLError:
        return None


def _reason(driver: str, cuda: tuple[int, int], hidden: str | None) -> str:
    """Return why torch sees no GPU, and what to do.

    Args:
        driver: its version.
        cuda: major and minor version of the newest CUDA that it runs.
        hidden: CUDA_VISIBLE_DEVICES, where it is set.
    """
    build = torch.version.cuda
    major, minor = cuda
    runs = f"driver {driver}, for CUDA {major}.{minor}"
    if build is None or int(build.split(".")[0]) > major:
        found = f"a build for CUDA {build}" if build else "a build without CUDA"
        what = f"torch {torch.__version__} is {found}, found {runs}."
        if major < 12:
            return f"{what} Install driver 580 or later."
        fitting = "cu130" if major > 12 else "cu126"
        return f"{what} Install the build that fits: {_INSTALL}{fitting}"
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES is {hidden}, which names none of them: unset it."
    return f"found {runs}. Run python -c 'import torch; torch.cuda.init()' to see the reason."
