"""Immediate exit on SIGINT or SIGTERM, even while the main thread waits in a collective."""

import os
import signal
import threading
from collections.abc import Callable

from decoding.app.terminal.streams import show_cursor
from parallel.ranks.environment import is_launched

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE_S = 10.0  # until the last line is printed
DOUBLE_INTERRUPT_S = 1.0  # Ctrl-C arrives twice, from the terminal and the launcher


def signal_source(name: str) -> str:
    """Return a signal's name and possible cause: a launcher ends all ranks when one is lost."""
    return f"{name}, or another rank ended" if name == "SIGTERM" and is_launched() else name


class Interrupts:
    """A thread that on a signal calls `on_exit(signal name)`, and exits with 128 + the signal's
    number.

    A Python signal handler would wait for the main thread, which may be blocked in a collective
    whose peer is gone. Records are on disk as soon as they exist, so there is nothing to unwind.
    """

    def __init__(self, on_exit: Callable[[str], None]):
        self.on_exit = on_exit
        # Handlers called first, on that thread; one that returns True keeps the process running.
        self.answers: dict[signal.Signals, Callable[[], bool]] = {}
        self._reading, writing = os.pipe()
        os.set_blocking(writing, False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)  # the byte on the pipe is what counts
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._wait, name="signals", daemon=True).start()

    def stop_first(self, stop: Callable[[], None]) -> None:
        """Call `stop` before `on_exit`: it removes the progress bars from the terminal."""
        on_exit = self.on_exit

        def stop_and_exit(name: str) -> None:
            stop()
            on_exit(name)

        self.on_exit = stop_and_exit

    def _wait(self) -> None:
        number = signal.SIGTERM
        try:
            number = self._wait_for_exit_signal()
            # printing blocks if the reader of a pipe has stopped
            last = threading.Thread(target=self._end, args=(number.name,), daemon=True)
            last.start()
            last.join(_PATIENCE_S)
        finally:
            os._exit(128 + number)

    def _end(self, name: str) -> None:
        try:
            self.on_exit(name)
        finally:
            show_cursor()  # a progress bar started at this moment may have hidden it again

    def _wait_for_exit_signal(self) -> signal.Signals:
        """Return the first signal that no handler consumes."""
        while True:
            number = os.read(self._reading, 1)[0]
            if number not in _SIGNALS:
                continue
            answer = self.answers.get(signal.Signals(number))
            if answer is None or not answer():
                return signal.Signals(number)
