"""Signs of life of a thread, for the heartbeat of :mod:`fp8tune.fleet.heartbeat`, which must tell work from a hang.

Code that waits for something with a time limit of its own gives a sign now and then: it waits, and does not hang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

EVERY_S = 1.0  # seconds between the signs of one wait

_listener: ContextVar[Callable[[], None]] = ContextVar("listener", default=lambda: None)  # of this thread


def sign() -> None:
    """Report that the calling thread gets on."""
    _listener.get()()


@contextlib.contextmanager
def heard(listener: Callable[[], None]) -> Iterator[None]:
    """Call ``listener`` at each sign of this thread, and of no other, while the context is open."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def result(future: Future[T]) -> T:
    """Return or raise the result of a future that has a time limit of its own, with signs until then."""
    while not future.done():
        sign()
        wait([future], EVERY_S)
    return future.result()
