"""Ties a process's life to that of the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent ends."""


def signal_when_parent_ends(number: signal.Signals, *, parent: int | None = None) -> None:
    """Have the kernel send a signal to this process when its parent is gone, however it went (Linux).

    Args:
        parent: the parent's process id, if known: it may have ended before this call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)
