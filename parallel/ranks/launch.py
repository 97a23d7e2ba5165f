"""Launch of the ranks on this machine with torch's elastic launcher, without torchrun's log."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from offload.errors import TierForceError
from parallel.ranks.python_module import module_arguments

_FORWARDED_SIGNALS = "SIGHUP,SIGQUIT"  # signals that torch's launcher forwards to the ranks
# Simultaneously open files: of the launcher, and in addition per rank. Measured on CPUs: 30 with
# two ranks.
_LAUNCHER_FILES = 64
_FILES_PER_RANK = 8
# Environment variable with the path of a file, which holds the id of the process that handles
# signals itself, and those signals.
_HANDLER_FILE_VARIABLE = "TIERFORCE_ANSWERS_SIGNALS"


def answer_signals(*signals: signal.Signals) -> None:
    """Have the launcher forward SIGINT or SIGTERM to this process instead of ending the ranks."""
    if path := os.environ.get(_HANDLER_FILE_VARIABLE):
        Path(path).write_text(json.dumps([os.getpid(), *signals]))


def require_open_files(count: int, what: str) -> None:
    """Raise the limit of open files of this process and its children to at least `count`.

    Raises TierForceError, which says that `what` needs them, if the hard limit is lower: torch's
    sockets would fail with a C++ stack trace, or wait for each other.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise TierForceError(
            f"{what} needs {count} open files at a time, and `ulimit -Hn` allows {hard}: raise it "
            "(in /etc/security/limits.conf, or docker run --ulimit nofile=1024)."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def launch(ranks: int, module: str, arguments: Sequence[str], advice: str) -> int:
    """Run `python -m module arguments` as `ranks` ranks of one group, and return the exit code.

    It is that of the first rank that failed, or 0. SIGINT and SIGTERM end all ranks, unless one of
    them handles these signals. If a rank dies, the others are ended. A rank killed by a signal
    cannot report it, so it is reported here, with `advice` on what to do. Raises TierForceError if
    the system allows too few open files.
    """

    def interrupt(number: int, _: object) -> None:
        for rank in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                rank.send_signal(signal.SIGCONT)  # a stopped process would not receive the signal
        with suppress(OSError, ValueError):
            handler_pid, *handled_signals = json.loads(
                Path(os.environ.get(_HANDLER_FILE_VARIABLE, "")).read_text()
            )
            if number in handled_signals:
                os.kill(handler_pid, number)
                return
        raise SignalException("interrupted", signal.Signals(number))

    require_open_files(_LAUNCHER_FILES + _FILES_PER_RANK * ranks, f"`gpus` {ranks}")
    os.environ.pop(_HANDLER_FILE_VARIABLE, None)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _FORWARDED_SIGNALS
    # torch's log would only repeat what the ranks print themselves
    logging.disable(logging.CRITICAL)
    # without it torch would warn and use 1 thread
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    with tempfile.TemporaryDirectory(prefix="tierforce-") as logs:
        os.environ[_HANDLER_FILE_VARIABLE] = str(Path(logs) / "answers-signals")
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            run_id=f"tierforce-{os.getpid()}",
            max_restarts=0,
            local_addr="localhost",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        if hasattr(config, "signals_to_handle"):  # some versions of torch use only this
            config.signals_to_handle = _FORWARDED_SIGNALS
        try:
            signal.signal(signal.SIGINT, interrupt)
            signal.signal(signal.SIGTERM, interrupt)
            elastic_launch(config, sys.executable)("-u", *module_arguments(module), *arguments)
        except ChildFailedError as error:
            return _exit_code(error, advice)
        except SignalException as error:
            return 128 + error.sigval
    return 0


def _exit_code(error: ChildFailedError, advice: str) -> int:
    rank, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        return failure.exitcode
    number = -failure.exitcode
    if number not in (signal.SIGTERM, signal.SIGINT):
        print(
            f"tierforce: rank {rank} was killed by {signal.Signals(number).name} (out of memory?). "
            f"{advice}",
            file=sys.stderr,
        )
    return 128 + number
