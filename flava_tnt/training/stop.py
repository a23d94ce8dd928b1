"""Requests to stop: a signal sets a flag, and the ranks agree on it at the next step."""

from __future__ import annotations

import signal
import types


class StopRequest:
    """SIGTERM, SIGINT, SIGHUP and SIGUSR1 ask for a stop after the running step.

    A second SIGINT ends this process at once.
    """

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = 0

    def install(self) -> None:
        """Take over the signals of this process; call it in the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: types.FrameType | None) -> None:
        self.requested = True
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
