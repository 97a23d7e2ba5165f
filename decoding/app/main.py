"""The entry point: `tierforce`, or `-m decoding.cli` under torchrun.

Every failure is one line, and a non-zero exit code on all ranks.
"""

import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from typing import Any, cast

from decoding.app.environment import set_environment_defaults
from decoding.app.terminal.streams import (
    CheckedStdout,
    SafeStderr,
    advice_after_loss,
    printable,
    say,
)
from offload.errors import TierForceError, exceeded_limit, is_out_of_memory, one_line
from parallel.ranks.environment import RankLost, die_with_parent, rank_from_env


def main() -> None:
    """Run the command line, and exit the process."""
    # Ctrl-C ends the process without a traceback until a command's `Interrupts` handles signals.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    set_environment_defaults()  # before torch is imported
    die_with_parent()
    if sys.stderr is None:  # closed by the parent process
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if os.environ.get("COLUMNS") == "0":  # a terminal without a width, where rich prints nothing
        del os.environ["COLUMNS"]
    sys.stderr = cast(Any, SafeStderr(sys.stderr))
    sys.stdout = cast(Any, CheckedStdout(sys.stdout))
    code = 1
    try:
        rank = rank_from_env().rank
        if rank:
            # Rank 0 reports for all ranks.
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        code = _run(rank)
    except TierForceError as error:  # invalid RANK or WORLD_SIZE
        say(f"tierforce: {error}")
    try:
        sys.stdout.flush()
    except SystemExit as done:  # the reader has closed the pipe
        code = code or cast(int, done.code)
    except TierForceError as error:
        if not code:
            say(f"tierforce: {error}")
        code = code or 1
    os._exit(code)  # without the clean-up of torch.distributed, which would wait for a lost rank


def _run(rank: int) -> int:
    """Run the command as this rank, and return the exit code."""
    from decoding.app.commands import app
    from decoding.app.options import as_flags

    try:
        app()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except RankLost as error:
        if os.environ.get("TIERFORCE_DEBUG"):  # raising it would block in clean-up
            traceback.print_exc(file=sys.__stderr__)
        time.sleep(1)  # a signal sent to all ranks may arrive and explain more
        say(f"tierforce: {error} {advice_after_loss(sys.argv[1:])}")
    except TierForceError as error:
        say(f"tierforce: {as_flags(str(error))}")
        # A launcher ends all ranks when the first exits: other ranks leave rank 0 time to report.
        time.sleep(rank and 10)
    except Exception as error:
        _report_unexpected(rank, error)
    return 1


def _report_unexpected(rank: int, error: Exception) -> None:
    """Report an unexpected error in one line; raise it if TIERFORCE_DEBUG is set."""
    if is_out_of_memory(error):
        advice = advice_after_loss(sys.argv[1:])
        reason = f"out of memory: {one_line(error)} Free memory first. {advice}"
    elif (limit := exceeded_limit(error)) is not None:
        reason = limit
    elif os.environ.get("TIERFORCE_DEBUG"):
        raise error
    else:
        reason = f"{type(error).__name__}: {one_line(error)} (TIERFORCE_DEBUG=1 shows where)"
    with suppress(OSError, AttributeError):  # other ranks may not have failed: this one reports
        print(printable(f"tierforce: rank {rank}: {reason}"), file=sys.__stderr__, flush=True)
