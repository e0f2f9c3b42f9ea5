"""What is remembered of an open database for as long as it is open, though its connection be lost and made again."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection

_OPTION = "fp8tune"


def begin(connection: Connection) -> Connection:
    """A connection that remembers."""
    return connection.execution_options(**{_OPTION: {}})


def of(connection: Connection) -> dict[str, Any]:
    """What is remembered, by name."""
    found: dict[str, Any] = connection.get_execution_options()[_OPTION]
    return found
