"""How a command ends that is told to: by Ctrl-C, or by the SIGTERM of a time limit or of a CI job that is cancelled."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def stopping_cleanly() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does: a SystemExit with code 143. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
