"""Starting the ranks: torch's elastic launcher, on this machine, without torchrun's log."""

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

_PASSED_ON = "SIGHUP,SIGQUIT"  # signals that torch's launcher sends to the ranks
# files that a process opens at a time, seen on CPUs: 30 with two ranks
_FILES, _RANK_FILES = 64, 8
# names a file with the number of the process that answers signals itself, and those signals
_ANSWERS = "TIERFORCE_ANSWERS_SIGNALS"


def answer_signals(*signals: signal.Signals) -> None:
    """Let a launcher of this process pass these on to it, and end nobody: SIGINT, SIGTERM."""
    if path := os.environ.get(_ANSWERS):
        Path(path).write_text(json.dumps([os.getpid(), *signals]))


def require_open_files(count: int, what: str) -> None:
    """Let this process and what it starts open so many files at a time.

    Raises TierForceError, which names `what` needs them, where the hard limit is lower: torch's
    sockets would fail with a stack of C++, or wait for each other.
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
    """Run `python -m module arguments` as `ranks` ranks of one group; returns the exit code of the
    first rank that failed, or 0.

    SIGINT and SIGTERM end them all, unless one of them answers these. When a rank dies the others
    are ended. A rank that was killed by a signal could not say so itself, so it is said here, with
    `advice` on what to do. Raises TierForceError where the system allows too few open files.
    """

    def interrupt(number: int, _: object) -> None:
        for rank in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                rank.send_signal(signal.SIGCONT)  # one that is stopped would hear nothing
        with suppress(OSError, ValueError):
            answering, *answered = json.loads(Path(os.environ.get(_ANSWERS, "")).read_text())
            if number in answered:
                os.kill(answering, number)
                return
        raise SignalException("interrupted", signal.Signals(number))

    require_open_files(_FILES + _RANK_FILES * ranks, f"`gpus` {ranks}")
    os.environ.pop(_ANSWERS, None)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _PASSED_ON
    # this process has nothing to log but torch's account of what the ranks say themselves
    logging.disable(logging.CRITICAL)
    # else torch warns and takes 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    with tempfile.TemporaryDirectory(prefix="tierforce-") as logs:
        os.environ[_ANSWERS] = str(Path(logs) / "answers-signals")
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
        if hasattr(config, "signals_to_handle"):  # some releases of torch go by this alone
            config.signals_to_handle = _PASSED_ON
        try:
            signal.signal(signal.SIGINT, interrupt)
            signal.signal(signal.SIGTERM, interrupt)
            elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
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
