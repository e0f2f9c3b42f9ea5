"""An open database and its transactions: the ground on which every query and statement stands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from fp8tune.errors import DatabaseError
from fp8tune.store import database
from fp8tune.store.writing import Writer


class Connected:
    """One open connection."""

    def __init__(self, connection: Connection, *, writable: bool) -> None:
        self._connection = connection
        self._writable = writable
        self._writer = Writer(connection)

    def close(self) -> None:
        """Close; SQLite is left as one plain file where no other process has it open."""
        database.close(self._connection, wrote=self._writable)

    @contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[None]:
        if write and not self._writable:
            raise DatabaseError("the database was opened for reading only: open it with writable=True")
        try:
            with database.transaction(self._connection, write=write):
                yield
        except BaseException:
            self._writer.forget()
            raise


Of = TypeVar("Of", bound=Connected)
Given = ParamSpec("Given")
Found = TypeVar("Found")
_Method = Callable[Concatenate[Of, Given], Found]


def reads(method: _Method[Of, Given, Found]) -> _Method[Of, Given, Found]:
    """A method that reads in a transaction of its own: all that it reads is of one moment."""
    return _within_transaction(method, write=False)


def writes(method: _Method[Of, Given, Found]) -> _Method[Of, Given, Found]:
    """A method that writes in a transaction of its own, all or nothing."""
    return _within_transaction(method, write=True)


def _within_transaction(method: _Method[Of, Given, Found], *, write: bool) -> _Method[Of, Given, Found]:
    @functools.wraps(method)
    def within(self: Of, /, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        with self._transaction(write=write):
            return method(self, *args, **kwargs)

    return within
