"""An open database whose transactions are repeated when the connection is lost."""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import Connection

from fp8tune import alive
from fp8tune.store.database import Database, LostConnectionError
from fp8tune.store.schema import VERSION

PATIENCE_S = 300.0
"""Patience with a server that went away: one that is restarted or upgraded is back by then."""

LONGEST_PAUSE_S = 5.0
ANNOUNCED_AFTER_S = 1.0

_logger = logging.getLogger("fp8tune")
_reached: set[str] = set()

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")
AnyStore = TypeVar("AnyStore", bound="Connected")


class Connected:
    """An open database. A context manager; one thread at a time."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._open: Connection | None = None
        self._fence: Callable[[Connection], None] | None = None
        """Called at the beginning of each write; raises to store nothing."""

    @classmethod
    def open(
        cls,
        url: str,
        *,
        create: bool = False,
        writable: bool = True,
        wait: bool = False,
        versions: tuple[int, ...] = (VERSION,),
    ) -> Self:
        """Open a plain path or a database URL.

        Args:
            url: The database.
            create: Make a missing file, and the tables of an empty database.
            writable: Without it, nothing needs a right to write.
            wait: Wait for a server that this process has never reached.
            versions: Versions of the schema that the caller can read.

        Raises:
            DatabaseError: The database cannot be used.
        """
        waiting = _Waiting()
        while True:
            try:
                database = Database(url, create=create, writable=writable, versions=versions)
            except LostConnectionError as lost:
                if not (wait or lost.is_starting or lost.label in _reached):
                    raise
                waiting.pause(lost)
            else:
                _reached.add(database.label)
                waiting.end()
                return cls(database)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close. A file is left as one plain file, unless another process has it open."""
        self.database.close()

    @property
    def _connection(self) -> Connection:
        assert self._open is not None, "outside of a transaction"
        return self._open

    def _before_reading(self) -> None:
        """Store what waits: whatever is asked next knows it."""

    def _begin(self, *, write: bool) -> None:
        """Do what each transaction begins with."""
        if write and self._fence is not None:
            self._fence(self._connection)

    def _committed(self) -> None:
        """Note that a writing transaction was committed."""

    def _forget(self) -> None:
        """Drop what was remembered of a transaction that was rolled back."""

    def run(self, work: Callable[[], Value], *, write: bool = False) -> Value:
        """Return the result of ``work`` in a transaction, repeated until it is committed.

        All writes are idempotent, so a commit whose answer was lost may be repeated.

        Raises:
            LostConnectionError: The server did not come back in time.
        """
        if self._open is not None:  # within another transaction
            return work()
        if not write:
            self._before_reading()
        waiting = _Waiting()
        while True:
            try:
                with self.database.transaction(write=write) as self._open:
                    self._begin(write=write)
                    value = work()
                if write:
                    self._committed()
                waiting.end()
                return value
            except BaseException as error:
                self._open = None
                self._forget()
                if not isinstance(error, LostConnectionError) or error.label != self.database.label:
                    raise
                waiting.pause(error)
            finally:
                self._open = None


def reads(
    method: Callable[Concatenate[AnyStore, Arguments], Value],
) -> Callable[Concatenate[AnyStore, Arguments], Value]:
    """Make a method read in one transaction, which sees one state of the database."""
    reading: Callable[Concatenate[AnyStore, Arguments], Value] = _within(method, write=False)
    return reading


def writes(
    method: Callable[Concatenate[AnyStore, Arguments], Value],
) -> Callable[Concatenate[AnyStore, Arguments], Value]:
    """Make a method write in one transaction, all or nothing."""
    writing: Callable[Concatenate[AnyStore, Arguments], Value] = _within(method, write=True)
    return writing


def _within(method: Any, *, write: bool) -> Any:
    @functools.wraps(method)
    def call(self: Connected, *args: Any, **options: Any) -> Any:
        # A generator could be read once only, and the transaction may be repeated.
        args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
        return self.run(lambda: method(self, *args, **options), write=write)

    return call


class _Waiting:
    """Pauses between the attempts of one transaction."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._pause_s, self._label = 0.05, ""

    def pause(self, lost: LostConnectionError) -> None:
        """Wait a moment, longer each time. Raises the error after PATIENCE_S."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        left_s = PATIENCE_S - (now - self._since)
        if left_s <= 0:
            raise lost
        if now - self._since >= ANNOUNCED_AFTER_S and not self._label:
            self._label = lost.label
            _logger.warning(f"{lost.label} does not answer: waiting up to {PATIENCE_S / 60:.3g} min")
        alive.sign()
        # Many workers have lost the same server: they come back one by one.
        time.sleep(min(self._pause_s * random.uniform(0.5, 1), left_s))
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def end(self) -> None:
        """Log that the connection is back, if a wait was announced."""
        if self._label and self._since is not None:
            _logger.warning(f"{self._label}: the connection is back after {time.monotonic() - self._since:.0f} s")
