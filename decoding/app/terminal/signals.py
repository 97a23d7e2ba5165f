"""Ending at once on SIGINT or SIGTERM, even while the main thread waits inside a collective."""

import os
import signal
import threading
from collections.abc import Callable

from decoding.app.terminal.streams import show_cursor
from parallel.ranks.environment import is_launched

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
DOUBLE_INTERRUPT_S = 1.0  # a terminal and a launcher send the same signal twice


def signal_source(name: str) -> str:
    """Name a signal, and who may have sent it: a launcher ends all ranks when it has lost one."""
    return f"{name}, or another rank ended" if name == "SIGTERM" and is_launched() else name


class Interrupts:
    """From its making on, a signal makes a thread call `last_words(name)` and end the process with
    128 + the signal's number.

    A Python signal handler would have to wait for the main thread, which may sit in a collective
    whose peer is gone. Records are on disk as soon as they exist, so there is nothing to unwind.
    """

    def __init__(self, last_words: Callable[[str], None]):
        self.last_words = last_words
        # what a signal makes that thread call first; it tells whether to go on
        self.answers: dict[signal.Signals, Callable[[], bool]] = {}
        self._reading, writing = os.pipe()
        os.set_blocking(writing, False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)  # the byte on the pipe is what counts
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._wait, name="signals", daemon=True).start()

    def stop_first(self, stop: Callable[[], None]) -> None:
        """Stop something before the last words: what is shown on the terminal."""
        last_words = self.last_words

        def say_them(name: str) -> None:
            stop()
            last_words(name)

        self.last_words = say_them

    def _wait(self) -> None:
        number = signal.SIGTERM
        try:
            number = self._ending()
            self.last_words(number.name)
        finally:
            show_cursor()  # progress that begins at this moment hides it once more
            os._exit(128 + number)

    def _ending(self) -> signal.Signals:
        """Wait for a signal that ends the process, and return it."""
        while True:
            number = os.read(self._reading, 1)[0]
            if number not in _SIGNALS:
                continue
            answer = self.answers.get(signal.Signals(number))
            if answer is None or not answer():
                return signal.Signals(number)
