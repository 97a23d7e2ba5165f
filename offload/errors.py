"""Errors that talk to the person at the keyboard: what is wrong, what was found, what to do."""

from __future__ import annotations

import errno
import resource


class TierForceError(Exception):
    """Anything that stops a job or a document for a reason the user can act on; its text is one
    complete line.
    """


class InsufficientMemoryError(TierForceError):
    """The job does not fit the memory there is; says what is needed and what is available.

    `host_bytes`: what is lacking of host memory, where the device would do.
    """

    def __init__(self, message: str, host_bytes: int = 0):
        super().__init__(message)
        self.host_bytes = host_bytes


class InvalidRequestError(TierForceError):
    """One document cannot be processed; a batch records it and goes on."""


class RequestCancelled(TierForceError):
    """Nobody wants a text any more whose prompt is being read."""


class CorruptCacheError(TierForceError):
    """What was written to disk is not there any more as it was written."""


def one_line(error: BaseException) -> str:
    """What somebody else's error says, for use in a message of ours."""
    return " ".join(str(error).split()) or type(error).__name__


_NO_MEMORY = (  # what allocators say that raise nothing but a RuntimeError
    "DefaultCPUAllocator",
    "not enough memory",
    "could not create a primitive",
    "could not create a memory",
    "std::bad_alloc",
    "out of memory",
    # of cuBLAS, cuDNN and NCCL
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "Cannot allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out, on a device or on the host, whichever allocator noticed."""
    # the latter is torch's
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):  # of what maps files or starts processes
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def exceeded_limit(error: BaseException) -> str | None:
    """Say which limit of the system an error has met, and what to do; None for other errors."""
    number = error.errno if isinstance(error, OSError) else None
    text = one_line(error).lower()
    if number in (errno.EMFILE, errno.ENFILE) or "too many open files" in text:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"too many open files: `ulimit -n` allows {allowed}. Raise it: ulimit -n 1024."
    if number == errno.EAGAIN or "can't start new thread" in text:
        return (
            "the system starts no more processes or threads: raise `ulimit -u`, or the limit on "
            "processes of the container."
        )
    if "no usable temporary directory" in text:
        return "no folder for temporary files can be written: set TMPDIR to one that can."
    if number in (errno.ENOSPC, errno.EDQUOT):
        assert isinstance(error, OSError)
        where = f" for {error.filename}" if error.filename else ""
        return f"no space left on the disk{where}: free some, or set TMPDIR to another disk."
    return None
