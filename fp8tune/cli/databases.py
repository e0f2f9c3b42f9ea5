"""Databases of a command: the one that it writes, and those that it reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fp8tune.render.terminal import notice

if TYPE_CHECKING:
    from fp8tune.store.layers import Reader


def to_write(db: str | None, say: Callable[[str], None] = notice, *, create: bool = True) -> str:
    """Return ``--db``, or the user's own database. Raises UsageError if git tracks it: the next pull would conflict."""
    from fp8tune.store import location

    return location.to_write(db, say, create=create)


@contextlib.contextmanager
def opened(db: str | None) -> Iterator[tuple[Reader, str]]:
    """Open ``--db``, or the user's own results with those that come with fp8tune; yield them with their label."""
    from fp8tune.store import layers, location

    databases = location.to_read(db, notice)
    with layers.opened_databases(databases, notice) as reader:
        yield reader, databases.label
