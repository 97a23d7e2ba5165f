"""Errors with messages for the user: what is wrong, what was found, what to do."""

from __future__ import annotations

import errno
import resource


class TierForceError(Exception):
    """An error of a job or document that the user can act on; its message is one complete line."""


class InsufficientMemoryError(TierForceError):
    """The job does not fit in memory; the message says how much is needed and available.

    `host_bytes`: host memory that is missing, if device memory suffices. `fitting_context`: tokens
    of prompt and output that would fit, if that was looked for.
    """

    def __init__(self, message: str, host_bytes: int = 0, fitting_context: int = 0):
        super().__init__(message)
        self.host_bytes, self.fitting_context = host_bytes, fitting_context


class InvalidRequestError(TierForceError):
    """A request cannot be processed; a batch records the error and continues."""


class TruncatedPromptWarning(UserWarning):
    """A prompt is longer than the context, and its beginning is dropped."""


class RequestCancelled(TierForceError):
    """A request was cancelled during prefill."""


class CorruptCacheError(TierForceError):
    """A file of the prompt cache on disk is missing or corrupt."""


def one_line(error: BaseException) -> str:
    """Return an error's message in one line, to be quoted in another message."""
    return " ".join(str(error).split()) or type(error).__name__


_NO_MEMORY = (  # messages of allocators that raise a plain RuntimeError
    "DefaultCPUAllocator",
    "not enough memory",
    "could not create a primitive",
    "could not create a memory",
    "std::bad_alloc",
    "out of memory",
    # cuBLAS, cuDNN and NCCL
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "Cannot allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that device or host memory ran out, for any allocator."""
    # OutOfMemoryError is torch's
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):  # raised by mmap or fork
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def exceeded_limit(error: BaseException) -> str | None:
    """Return which system limit caused an error, and what to do; None for other errors."""
    number = error.errno if isinstance(error, OSError) else None
    message = one_line(error).lower()
    if number in (errno.EMFILE, errno.ENFILE) or "too many open files" in message:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"too many open files: `ulimit -n` allows {limit}. Raise it: ulimit -n 1024."
    if number == errno.EAGAIN or "can't start new thread" in message:
        return (
            "the system cannot start more processes or threads: raise `ulimit -u`, or the "
            "container's limit on processes."
        )
    if "no usable temporary directory" in message:
        return "no folder for temporary files is writable: set TMPDIR to one that is."
    if number in (errno.ENOSPC, errno.EDQUOT):
        assert isinstance(error, OSError)
        where = f" for {error.filename}" if error.filename else ""
        return f"no space left on the disk{where}: free some, or set TMPDIR to another disk."
    return None
