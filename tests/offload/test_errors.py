"""Out-of-memory errors of all libraries are recognised."""

from __future__ import annotations

import errno

import pytest
import torch

from offload.errors import is_out_of_memory


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
        "NCCL error: unhandled system error. Last error: mmap failed: Cannot allocate memory",
        "Triton Error [CUDA]: out of memory",
    ],
)
def test_out_of_memory_messages_of_gpu_libraries_are_recognised(message: str) -> None:
    assert is_out_of_memory(RuntimeError(message))
    assert not is_out_of_memory(ValueError(message))


def test_other_errors_are_not_out_of_memory() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not is_out_of_memory(OSError(errno.ENOENT, "out of memory"))
    message = "out of resource: shared memory, Required: 139264, Hardware limit: 101376"
    assert not is_out_of_memory(RuntimeError(message))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))
