"""A process beside a job on a cluster, which cleans up behind it, whichever way it ends.

Where Ray's raylet dies it ends the job's process at once, without a word; and where that process is
killed, agents of a Ray that it had started stay. Neither can be told or ended from inside.
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

_DONE = b"done"
_MARK = "TIERFORCE_CLUSTER_JOB"  # in the environment of what a job starts: the job's process
_LOOK_S = 0.5  # between two looks at what the job has started
_LOOKS = 4  # for what is still being started when the job ends


class ClusterGuard:
    """The guard of this process."""

    def __init__(self, last_words: str):
        """Start it. `last_words` are said where this process ends without `dismiss`."""
        own = str(os.getpid())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "decoding.app.batch.cluster_guard", own, last_words],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is not for it
        )
        os.environ[_MARK] = own

    def dismiss(self) -> None:
        """Let it end what was started and is still there, and go."""
        self.process.communicate(_DONE)


def _guard(job: int, last_words: str) -> None:
    """Note what a job starts until it closes this process's standard input; then end all that.

    The job is named by its process, which may have died already.
    """
    started = set[psutil.Process]()
    with suppress(psutil.Error):
        process = psutil.Process(job)
        while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
            started |= set(process.children(recursive=True))
    is_done = sys.stdin.buffer.read() == _DONE
    if not is_done:
        show_cursor()
        say(last_words)
    started.discard(psutil.Process())
    for _ in range(_LOOKS):
        for process in started | _marked(job):
            with suppress(psutil.Error):
                process.kill()
        if is_done:  # it has waited for most of them itself
            return
        time.sleep(_LOOK_S)


def _marked(job: int) -> set[psutil.Process]:
    """Return what the job has started, as far as it has not written over its environment."""
    found = set[psutil.Process]()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MARK) == str(job):
                found.add(process)
    return found


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2])
