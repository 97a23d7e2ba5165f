"""Starting the ranks: torch's elastic launcher, on this machine, without torchrun's log."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch(ranks: int, module: str, arguments: Sequence[str]) -> int:
    """Run `python -m module arguments` as `ranks` ranks of one group; returns the exit code of the
    first rank that failed, or 0.

    When a rank dies the others are ended. A rank that was killed by a signal could not say so
    itself, so it is said here.
    """
    interrupts: list[int] = []

    def interrupt(number: int, _: object) -> None:
        interrupts.append(number)
        # a rank in whose interpreter nothing runs yet would answer SIGINT with a traceback
        signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGINT, interrupt)
    # which it passes on to the ranks
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGHUP,SIGQUIT"
    # this process has nothing to log but torch's account of what the ranks say themselves
    logging.disable(logging.CRITICAL)
    # else torch warns and takes 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    with tempfile.TemporaryDirectory(prefix="tierforce-") as logs:
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
        try:
            elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
        except ChildFailedError as error:
            return _exit_code(error)
        except SignalException as error:
            return 128 + (interrupts or [error.sigval])[0]
    return 0


def _exit_code(error: ChildFailedError) -> int:
    rank, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        return failure.exitcode
    number = -failure.exitcode
    if number not in (signal.SIGTERM, signal.SIGINT):
        print(
            f"tierforce: rank {rank} was killed by {signal.Signals(number).name} (out of memory?). "
            "Finished records are safe: run the same command again to go on.",
            file=sys.stderr,
        )
    return 128 + number
