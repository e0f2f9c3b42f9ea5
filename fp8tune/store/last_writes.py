"""What became of a write whose connection was lost while it was committed: each names itself in a row that it stores.

The row is part of the write, so it is there if and only if the write is. A transaction's id would not do: a server that
crashed gives an id again that it had given before.
"""

from __future__ import annotations

import time
import uuid

from sqlalchemy import Connection, delete, insert, inspect, select

from fp8tune.store import postgresql, remembered
from fp8tune.store.schema import LastWrites

KEPT_S = 86400.0
"""Rows of older writes are of connections that have ended: nobody waits for an answer so long."""

_WRITER, _NAME = "fp8tune: who writes", "fp8tune: the name of the last write"
_HAS_ROW, _IS_NAMED = "fp8tune: whether who writes has a row", "fp8tune: whether the write that has begun is named"

_BEGIN = f"""
WITH locked AS MATERIALIZED (SELECT pg_advisory_xact_lock({postgresql.WRITERS_LOCK}))
UPDATE last_writes SET name = '{{name}}', written_at = {{now}} FROM locked WHERE writer = '{{writer}}'
"""
"""Takes the writers' lock and names the write: one question to the server, where two take 0.5 ms longer on loopback."""


def begin(connection: Connection) -> None:
    """Begin a write on a server, by its name where there is a row for it."""
    memory = remembered.of(connection)
    if not memory.get(_HAS_ROW):
        postgresql.begin(connection, write=True)
        return
    memory[_NAME] = uuid.uuid4().hex
    named = _BEGIN.format(name=memory[_NAME], writer=memory[_WRITER], now=time.time())
    memory[_IS_NAMED] = connection.exec_driver_sql(named).rowcount == 1


def note(connection: Connection) -> None:
    """Name the write that has begun, unless it is named."""
    memory = remembered.of(connection)
    if connection.dialect.name == "sqlite" or memory.pop(_IS_NAMED, False):
        return
    memory[_HAS_ROW] = False
    memory[_WRITER], memory[_NAME], now = uuid.uuid4().hex, uuid.uuid4().hex, time.time()
    connection.execute(delete(LastWrites).where(LastWrites.c.written_at < now - KEPT_S))
    connection.execute(insert(LastWrites).values(writer=memory[_WRITER], name=memory[_NAME], written_at=now))


def note_committed(connection: Connection) -> None:
    """The last write is stored: its row names the next ones."""
    remembered.of(connection)[_HAS_ROW] = True


def is_committed(connection: Connection) -> bool:
    """Whether the last write that was named is stored. One that is still being committed is waited for."""
    memory = remembered.of(connection)
    with connection.begin():
        postgresql.begin(connection, write=True)  # a server that has not noticed the loss holds the lock until then
        if not inspect(connection).has_table(LastWrites.name):
            return False
        mine = select(LastWrites.c.name).where(LastWrites.c.writer == memory[_WRITER])
        return bool(connection.scalar(mine) == memory[_NAME])
