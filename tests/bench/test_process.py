"""An interrupt ends a function in a process of its own, at any time."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

from bench.harness import process
from bench.harness.process import call_in_process


@pytest.mark.parametrize("threads", [0, 1])  # another thread may receive the signal
def test_interrupt_while_the_process_starts_is_not_lost(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()
    for _ in range(threads):
        threading.Thread(target=done.wait).start()
    started: list[psutil.Process] = []
    context = process.multiprocessing.get_context("spawn")
    start = context.Process.start

    def interrupted(child: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        start(child)
        started.append(psutil.Process(child.pid))

    monkeypatch.setattr(context.Process, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call_in_process(time.sleep, 60)
    done.set()
    assert not started[0].is_running()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
