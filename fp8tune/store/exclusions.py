"""GPUs that a fleet does not rely on, with the reason: the statements behind the store."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import Connection, delete, select

from fp8tune.records import Device
from fp8tune.store import optional
from fp8tune.store.schema import Exclusions
from fp8tune.store.unreadable import readable
from fp8tune.store.writing import insert_ignoring


@dataclass(frozen=True)
class Exclusion:
    """A GPU that takes no units, and why."""

    device: str
    """Its name."""
    uuid_hash: str
    worker: str
    """Which worker found it: host, process and device."""
    reason: str
    excluded_at: float
    """Seconds since the epoch, by the host's clock."""


def exclude(connection: Connection, device: Device, worker: str, reason: str) -> None:
    """Note that a GPU is not relied on; what was noted of it before is replaced."""
    readmit(connection, device)
    values = Exclusion(device.name, device.uuid_hash, worker, reason, time.time())
    connection.execute(insert_ignoring(Exclusions, connection.dialect.name), vars(values))


def readmit(connection: Connection, device: Device) -> None:
    """Forget what was noted of a GPU: it is well now."""
    same = Exclusions.c.device == device.name, Exclusions.c.uuid_hash == device.uuid_hash
    connection.execute(delete(Exclusions).where(*same))


def exclusions(connection: Connection) -> list[Exclusion]:
    """All that is noted, the oldest first."""
    if not optional.is_there(connection, Exclusions):
        return []
    rows = readable(connection, select(Exclusions).order_by(Exclusions.c.excluded_at, Exclusions.c.uuid_hash))
    return [Exclusion(*row) for row in rows]
