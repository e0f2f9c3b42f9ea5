"""A transaction whose connection was lost is done again, whole, through a new connection; and never twice.

A commit may have been done although its answer was lost. The write's own name in the database then says what became
of it (:mod:`fp8tune.store.last_writes`), so nothing hangs on whether a write may be repeated.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

from sqlalchemy import Connection

from fp8tune import alive
from fp8tune.store import last_writes, remembered
from fp8tune.store.postgresql import LostConnectionError

PATIENCE_S = 300.0
"""How long to wait for a server: one that is restarted or upgraded is back by then, or somebody should look."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_SAID_AFTER_S = 1.0
_PATIENCE = "seconds to wait for a server"

_logger = logging.getLogger("fp8tune")
_reached: set[str] = set()

Result = TypeVar("Result")


def be_patient(connection: Connection, patience_s: float) -> None:
    """Set how long the transactions of a connection wait."""
    remembered.of(connection)[_PATIENCE] = patience_s


class _Waiting:
    """The pauses between the tries of one transaction: longer and longer, until the patience is at its end."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._label = ""

    def pause(self, lost: LostConnectionError) -> None:
        """Wait a moment. Raises the error at the end of the patience."""
        now = time.monotonic()
        if self._since is None:
            self._since = now - lost.waited_s
        waited_s = now - self._since
        if waited_s >= self._patience_s:
            raise lost.after(waited_s)
        if waited_s >= _SAID_AFTER_S and not self._label:
            self._label = lost.label
            _logger.warning(f"{lost.label} {lost.what}: waiting up to {_duration(self._patience_s)}, then going on")
        pause_s = self._pause_s * random.uniform(0.5, 1)  # many workers have lost the same server
        alive.sign()
        time.sleep(min(pause_s, self._patience_s - waited_s))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def end(self) -> None:
        """Say that it goes on, where it was said that it waits."""
        if self._label and self._since is not None:
            _logger.warning(f"{self._label}: going on after {_duration(time.monotonic() - self._since)}")


def whole(
    connection: Connection,
    transaction: Callable[[], AbstractContextManager[None]],
    work: Callable[[], Result],
    *,
    write: bool,
) -> Result:
    """What ``work`` returns within a transaction, which is done again until it is committed.

    Raises LostConnectionError at the end of the patience: nothing is stored then that was not before.
    """
    waiting = _Waiting(remembered.of(connection).get(_PATIENCE, PATIENCE_S))
    while True:
        done: list[Result] = []
        try:
            with transaction():
                done.append(work())
        except LostConnectionError as lost:
            if lost.connection is not connection:  # another's, such as the one that an import reads
                raise
            waiting.pause(lost)
            if not done or (write and not _was_committed(connection, waiting)):
                continue
        waiting.end()
        return done[0]


def _was_committed(connection: Connection, waiting: _Waiting) -> bool:
    """Whether the transaction was committed whose connection was lost meanwhile."""
    while True:
        try:
            return last_writes.is_committed(connection)
        except LostConnectionError as lost:
            waiting.pause(lost)


def repeatable(given: object) -> object:
    """An argument that may be read several times: of an iterator, what keeps the items that it gave."""
    return _Kept(given) if isinstance(given, Iterator) else given


class _Kept(Iterable[object]):
    """The items of an iterator, as often as they are asked for; each is taken from it when it is first needed."""

    def __init__(self, source: Iterator[object]) -> None:
        self._source, self._kept = source, list[object]()

    def __iter__(self) -> Iterator[object]:
        yield from self._kept
        for item in self._source:
            self._kept.append(item)
            yield item


def reached(label: str, opened: Callable[[], Result]) -> Result:
    """What ``opened`` returns. Waits for a server that this process has reached before, or that says it is starting."""
    waiting = _Waiting(PATIENCE_S)
    while True:
        try:
            found = opened()
        except LostConnectionError as lost:
            if not (lost.is_passing or label in _reached):
                raise
            waiting.pause(lost)
        else:
            _reached.add(label)
            waiting.end()
            return found


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.3g} min" if seconds >= 60 else f"{seconds:.3g} s"
