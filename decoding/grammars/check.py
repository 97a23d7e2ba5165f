"""Whether a grammar can be followed, found out in a process of its own (`checker`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import lru_cache

from decoding.grammars.checker import MEMORY_MB, PROCESSOR_S
from offload.errors import InvalidRequestError
from parallel.ranks.python_module import module_arguments

_TIMEOUT_S = 60.0  # much longer than the processor time, since the machine may be busy
_MODULE = "decoding.grammars.checker"
_VARIABLES = ("PATH", "LD_LIBRARY_PATH")
_REASONS = {
    signal.SIGXCPU: f"reading it takes more than {PROCESSOR_S} s",
    signal.SIGABRT: f"reading it takes more than {MEMORY_MB} MB of memory, or its references are "
    "nested too deeply",
    signal.SIGSEGV: "it is too large, or its references are nested too deeply",
}


@lru_cache(maxsize=8)  # a command checks a schema before models load, and then compiles it
def error_of(grammar: str) -> str:
    """Return why answers cannot follow a grammar in llguidance's format; empty if they can.

    Raises InvalidRequestError if that cannot be found out.
    """
    command = [sys.executable, "-I", *module_arguments(_MODULE), str(os.getpid())]
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    try:
        done = subprocess.run(
            command,
            input=grammar.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=variables,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InvalidRequestError(
            f"the grammar could not be checked within {_TIMEOUT_S:.0f} s: the machine is busy."
        ) from None
    except OSError as error:
        raise InvalidRequestError(
            f"no process can be started to check the grammar: {error}."
        ) from error
    if done.returncode == 0:
        reason = str(json.loads(done.stdout)["error"]).removesuffix(" <non-verbose/>")
        return "special tokens are not supported" if "special token" in reason else reason
    for number, reason in _REASONS.items():
        if done.returncode == -number:
            return reason
    return f"the process that read it ended with exit code {done.returncode}"
