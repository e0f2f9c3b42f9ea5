"""What became of a write whose connection was lost while it was committed: each names itself in a row that it stores.

The row is part of the write, so it is there if and only if the write is. A transaction's id would not do: a server that
crashed gives an id again that it had given before.
"""

from __future__ import annotations

import time
import uuid

from sqlalchemy import Connection, delete, insert, inspect, select, update

from fp8tune.store import postgresql, remembered
from fp8tune.store.schema import LastWrites

KEPT_S = 86400.0
"""Rows of older writes are of connections that have ended: nobody waits for an answer so long."""

_WRITER, _NAME = "fp8tune: who writes", "fp8tune: the name of the last write"


def note(connection: Connection) -> None:
    """Name the write that has begun, on a server."""
    if connection.dialect.name == "sqlite":
        return
    memory = remembered.of(connection)
    memory[_NAME] = uuid.uuid4().hex
    named = {"name": memory[_NAME], "written_at": time.time()}
    if _WRITER in memory:
        mine = update(LastWrites).where(LastWrites.c.writer == memory[_WRITER]).values(**named)
        if connection.execute(mine).rowcount:
            return
    memory[_WRITER] = uuid.uuid4().hex
    connection.execute(delete(LastWrites).where(LastWrites.c.written_at < named["written_at"] - KEPT_S))
    connection.execute(insert(LastWrites).values(writer=memory[_WRITER], **named))


def is_committed(connection: Connection) -> bool:
    """Whether the last write that was named is stored. One that is still being committed is waited for."""
    memory = remembered.of(connection)
    with connection.begin():
        postgresql.begin(connection, write=True)  # a server that has not noticed the loss holds the lock until then
        if not inspect(connection).has_table(LastWrites.name):
            return False
        mine = select(LastWrites.c.name).where(LastWrites.c.writer == memory[_WRITER])
        return bool(connection.scalar(mine) == memory[_NAME])
