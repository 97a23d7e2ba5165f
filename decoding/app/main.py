"""The entry: `tierforce`, or `-m decoding.cli` under torchrun.

Whatever goes wrong is one line and a non-zero exit on all ranks.
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
    """Run the command line, and leave."""
    # until a command's `Interrupts` listens, Ctrl-C just ends the process, without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    set_environment_defaults()  # before torch is imported
    die_with_parent()
    if sys.stderr is None:  # closed by whoever started this
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if os.environ.get("COLUMNS") == "0":  # a terminal without a width: rich prints nothing
        del os.environ["COLUMNS"]
    sys.stderr = cast(Any, SafeStderr(sys.stderr))
    sys.stdout = cast(Any, CheckedStdout(sys.stdout))
    code = 1
    try:
        rank = rank_from_env().rank
        if rank:
            # rank 0 says what all ranks have to say
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        code = _run(rank)
    except TierForceError as error:  # variables that name no rank
        say(f"tierforce: {error}")
    try:
        sys.stdout.flush()
    except SystemExit as leaving:  # nobody reads it
        code = code or cast(int, leaving.code)
    except TierForceError as error:
        if not code:
            say(f"tierforce: {error}")
        code = code or 1
    os._exit(code)  # a group that lost a rank would wait for it in its own clean-up


def _run(rank: int) -> int:
    """Run the command as this rank, and return the exit code."""
    from decoding.app.commands import app
    from decoding.app.options import as_flags

    try:
        app()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except RankLost as error:
        if os.environ.get("TIERFORCE_DEBUG"):  # not raised: the group's own clean-up would wait
            traceback.print_exc(file=sys.__stderr__)
        time.sleep(1)  # a signal to all ranks may be on its way here, and says more
        say(f"tierforce: {error} {advice_after_loss(sys.argv[1:])}")
    except TierForceError as error:
        say(f"tierforce: {as_flags(str(error))}")
        # launchers end the other ranks when the first leaves: let rank 0 speak, however slow it is
        time.sleep(rank and 10)
    except Exception as error:
        _explain(rank, error)
    return 1


def _explain(rank: int, error: Exception) -> None:
    """Say in one line what nobody foresaw; with TIERFORCE_DEBUG, raise it."""
    if is_out_of_memory(error):
        advice = advice_after_loss(sys.argv[1:])
        reason = f"out of memory: {one_line(error)} Free memory first. {advice}"
    elif (limit := exceeded_limit(error)) is not None:
        reason = limit
    elif os.environ.get("TIERFORCE_DEBUG"):
        raise error
    else:
        reason = f"{type(error).__name__}: {one_line(error)} (TIERFORCE_DEBUG=1 shows where)"
    with suppress(OSError, AttributeError):  # it struck this rank alone: whichever it is says so
        print(printable(f"tierforce: rank {rank}: {reason}"), file=sys.__stderr__, flush=True)
