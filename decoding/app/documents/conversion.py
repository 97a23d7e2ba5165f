"""Conversion of documents to text in a child process: a file that is a bomb, or that crashes its
parser, costs no more than that process.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, BinaryIO

from decoding.app.documents.converter import BYTES, PROCESSOR_S
from decoding.app.documents.formats.encodings import check_size
from offload.errors import InvalidRequestError
from parallel.ranks.python_module import module_arguments

_TIMEOUT_S = 600.0  # much longer than the processor time, since the machine may be busy
_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
_MAX_HEADER = 4096  # bytes of the line of JSON
_PIECE = 1 << 20
_POLL_S = 0.2  # interval of polling whether a conversion is cancelled
_MODULE = "decoding.app.documents.converter"
_is_cancelled: ContextVar[Callable[[], bool]] = ContextVar("_is_cancelled", default=lambda: False)


@contextmanager
def cancellable(is_cancelled: Callable[[], bool]) -> Iterator[None]:
    """End conversions of this thread in a block soon after `is_cancelled` returns True."""
    token = _is_cancelled.set(is_cancelled)
    try:
        yield
    finally:
        _is_cancelled.reset(token)


def convert(
    file: BinaryIO, kind: str, member: tuple[int, int, int] | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the text of a document, and what a record says of its source.

    Args:
        file: a regular file, read from its beginning.
        kind: one of `kinds`, of the document or of the archive's member.
        member: index, size and CRC-32 of the document in the archive `file`.

    Raises InvalidRequestError if it cannot be read within the limits.
    """
    command = [sys.executable, "-I", *module_arguments(_MODULE), str(os.getpid()), kind]
    command += map(str, member or ())
    os.lseek(file.fileno(), 0, os.SEEK_SET)  # a seek in the buffer alone is not seen by the child
    # tokens and keys in this process's environment are none of its business
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    try:
        process = subprocess.Popen(
            command,
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=variables,
        )
    except OSError as error:
        raise InvalidRequestError(f"no process can be started to read it: {error}.") from error
    with process:
        try:
            output = _read_output(process)
        finally:
            process.kill()
    header, _, text = output.partition(b"\n")
    try:
        source = json.loads(header)
    except ValueError:
        source = {}
    if not isinstance(source, dict) or source.pop(BYTES, None) != len(text):
        raise InvalidRequestError(_reason(process.returncode))
    if "error" in source:
        raise InvalidRequestError(source["error"])
    return text.decode(), source


def _read_output(process: subprocess.Popen[bytes]) -> bytes:
    """Return the output of a process. Raises InvalidRequestError if it takes too long."""
    assert process.stdout is not None
    deadline = time.monotonic() + _TIMEOUT_S
    output = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            while not selector.select(_POLL_S):
                if _is_cancelled.get()():
                    raise InvalidRequestError("reading it was cancelled.")
                if time.monotonic() > deadline:
                    raise InvalidRequestError(f"reading it takes longer than {_TIMEOUT_S:.0f} s.")
            piece = os.read(process.stdout.fileno(), _PIECE)
            if not piece:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(deadline - time.monotonic())
                return bytes(output)
            output += piece
            check_size(len(output) - _MAX_HEADER)


def _reason(code: int) -> str:
    """Return why a process gave no output, by its exit code."""
    if code == -signal.SIGXCPU:
        return f"reading it takes more than {PROCESSOR_S} s of processor time."
    if code < 0:
        reason = signal.strsignal(-code) or f"signal {-code}"
        return f"the process that read it ended ({reason}); the file may be damaged."
    return f"the process that read it ended with exit code {code}; the file may be damaged."
