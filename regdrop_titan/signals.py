"""Stopping by a signal where nothing is lost, or at once when asked twice."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from torchtitan.tools.logging import logger

STOPPED = 75  # exit status of a run that a signal stopped after saving: EX_TEMPFAIL, run it again to go on
SAME_REQUEST = 1.0  # seconds; a launcher forwards what the whole process group has received already


def interruptible(main: Callable[[], int]) -> int:
    """The exit status of a script whose results are written at its end: Ctrl-C ends it with one line."""
    try:
        return main()
    except KeyboardInterrupt:
        print("interrupted, no result is written", file=sys.stderr)
        return 128 + signal.SIGINT


class StopSignals:
    """While entered, SIGINT, SIGTERM and SIGUSR1 are noted in `received` instead of ending the process.

    A second one ends the process at once, with status 128 + its number. A thread of its own reads them, from the
    interpreter's C handler: the main thread may hang in a collective whose other ranks are gone.

    Args:
        will: what the first signal leads to, for the log.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self, will: str) -> None:
        self.will = will
        self.received = 0  # number of the first signal
        self.entered = self.finished = False

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread may set handlers; its signals are not ours then
        self.entered = True
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        self.wakeup_before = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        # a handler of Python's own must be there for the number to reach the socket
        self.handlers_before = {number: signal.signal(number, lambda *_: None) for number in self.NUMBERS}
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def _watch(self) -> None:
        first = 0.0
        while number := self.reader.recv(1):
            if number[0] not in self.NUMBERS or self.finished:
                continue
            if not self.received:
                self.received, first = number[0], time.monotonic()
                logger.info(f"{self.name}: {self.will}; a second signal ends at once")
            elif time.monotonic() - first > SAME_REQUEST:
                os._exit(128 + number[0])

    def finish(self) -> None:
        """All is saved, and the process is about to end: nothing more to stop. torchrun sends SIGTERM to the others
        when the first rank has gone with a status other than 0."""
        self.finished = True
        if self.entered:
            self.handlers_before[signal.SIGTERM] = signal.SIG_IGN

    @property
    def name(self) -> str:
        return signal.Signals(self.received).name

    def __exit__(self, *exception: object) -> None:
        if self.entered:
            for number, handler in self.handlers_before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self.wakeup_before)
            self.writer.close()  # ends the thread
