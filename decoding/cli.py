"""The entry: `tierforce`, or `-m decoding.cli` under torchrun. Whatever goes wrong is one line and a non-zero exit on all ranks."""

import os
import signal
import sys
import time

RANK = int(os.environ.get("RANK", 0))


def main() -> None:
    """Run the command line, and leave."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds: until `Interrupts` listens, Ctrl-C just ends them
    if RANK:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - rank 0 says what all ranks have to say
    code = _run()
    sys.stdout.flush()
    os._exit(code)  # a group that lost a rank would wait for it in its own clean-up


def _run() -> int:
    """The exit code."""
    import torch
    from transformers.utils import logging

    from decoding.commands import app, say
    from offload import TierForceError, one_line
    from parallel import RankLost

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        app()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except RankLost as error:
        time.sleep(1)  # a signal to all ranks may be on its way here, and says more
        say(f"tierforce: {error} Finished records are safe: run the same command again to go on.")
    except TierForceError as error:
        say(f"tierforce: {error}")
        time.sleep(RANK and 10)  # launchers end the other ranks when the first leaves: let rank 0 speak, however slow it is
    except (MemoryError, torch.OutOfMemoryError) as error:
        _fault(f"out of memory: {one_line(error)}")
    except Exception as error:
        if os.environ.get("TIERFORCE_DEBUG"):
            raise
        _fault(f"{type(error).__name__}: {one_line(error)} (TIERFORCE_DEBUG=1 shows where)")
    return 1


def _fault(reason: str) -> None:
    """What struck this rank alone: whichever rank it is says so."""
    print(f"tierforce: rank {RANK}: {reason}", file=sys.__stderr__, flush=True)


if __name__ == "__main__":
    main()
