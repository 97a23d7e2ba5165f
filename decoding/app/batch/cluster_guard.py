"""A companion process of a cluster job that cleans up after it, however it ends.

If Ray's raylet dies, the job's process exits at once, without a message; if that process is killed,
the Ray agents that it started keep running. The job itself can neither report nor prevent that.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import suppress

import psutil

from decoding.app.terminal.streams import say, show_cursor
from parallel.ranks.python_module import module_arguments

_DONE = b"done"
_MARK = "TIERFORCE_CLUSTER_JOB"  # in the environment of a job's child processes: its process id
_POLL_S = 0.5  # between polls for new child processes
_KILL_ROUNDS = 4  # catch processes still being started when the job ends


class ClusterGuard:
    """The guard of this process."""

    def __init__(self, message: str):
        """Start it. It prints `message` if this process ends without `dismiss`."""
        own = str(os.getpid())
        self.process = subprocess.Popen(
            [sys.executable, *module_arguments("decoding.app.batch.cluster_guard"), own, message],
            stdin=subprocess.PIPE,
            start_new_session=True,  # unaffected by Ctrl-C
        )
        os.environ[_MARK] = own

    def dismiss(self) -> None:
        """Let it kill the child processes that are left, and exit."""
        self.process.communicate(_DONE)


def _guard(job: int, message: str) -> None:
    """Collect a job's child processes until standard input closes; then kill them.

    `job` is a process id; the process may have died already.
    """
    started = set[psutil.Process]()
    with suppress(psutil.Error):
        process = psutil.Process(job)
        while not select.select([sys.stdin], [], [], _POLL_S)[0]:
            started |= set(process.children(recursive=True))
    is_done = sys.stdin.buffer.read() == _DONE
    if not is_done:
        show_cursor()
        say(message)
    started.discard(psutil.Process())
    for _ in range(_KILL_ROUNDS):
        for process in started | _marked(job):
            with suppress(psutil.Error):
                process.kill()
        if is_done:  # the job has already waited for its processes
            return
        time.sleep(_POLL_S)


def _marked(job: int) -> set[psutil.Process]:
    """Return the job's processes, except those that have overwritten their environment."""
    processes = set[psutil.Process]()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MARK) == str(job):
                processes.add(process)
    return processes


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2])
