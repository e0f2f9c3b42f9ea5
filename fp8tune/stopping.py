"""Graceful shutdown on SIGTERM and SIGHUP: a time limit, a cancelled job, a closed terminal.

Both unwind the stack as Ctrl-C does: workers end, the database is left as one plain file, temporary folders go.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

END_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))  # not on Windows


class Stopped(SystemExit):
    """A signal ended the command. The code is a shell's for that signal: 143 for SIGTERM, 129 for SIGHUP."""

    def __init__(self, number: int) -> None:
        self.name, self.exit_code = signal.Signals(number).name, 128 + number
        super().__init__(self.exit_code)


@contextlib.contextmanager
def stopping_cleanly() -> Iterator[None]:
    """Raise :class:`Stopped` at the first SIGTERM or SIGHUP. Does nothing outside the main thread.

    A second one would break off what the first began. A signal that is ignored already (``nohup``) stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if not received:
            received.append(number)
            raise Stopped(number)

    numbers = [number for number in END_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    except BaseException as ended:
        if received and not isinstance(ended, Stopped):  # whatever met the unwinding, such as a terminal that is gone
            raise Stopped(received[0]) from None
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Let child processes started here ignore Ctrl-C and :data:`END_SIGNALS`, which their parent gets, too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *END_SIGNALS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
