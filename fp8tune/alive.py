"""Signs of life of a thread, for whoever has to tell work from a hang (:mod:`fp8tune.fleet.lease`).

Whatever waits for something that has a time limit of its own gives a sign now and then: it waits, and does not hang.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

EVERY_S = 1.0
"""Seconds between the signs of one wait."""

_listeners: dict[int, Callable[[], None]] = {}
"""Thread -> who hears its signs."""


def sign() -> None:
    """The calling thread gets on."""
    if (listener := _listeners.get(threading.get_ident())) is not None:
        listener()


@contextlib.contextmanager
def heard(listener: Callable[[], None]) -> Iterator[None]:
    """While open, ``listener`` hears the signs of this thread, and of no other."""
    thread = threading.get_ident()
    before = _listeners.get(thread)
    _listeners[thread] = listener
    try:
        yield
    finally:
        _listeners.pop(thread)
        if before is not None:
            _listeners[thread] = before


def result(future: Future[T]) -> T:
    """What a future returns or raises that has a time limit of its own, with signs until then."""
    while not future.done():
        sign()
        wait([future], EVERY_S)
    return future.result()
