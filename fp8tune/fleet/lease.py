"""The heartbeat of a worker: a thread that renews its lease, as long as the work itself gets on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from fp8tune import alive
from fp8tune.errors import DatabaseError
from fp8tune.store.results import Store
from fp8tune.store.units import RENEWALS, Lease, LeaseLostError

STALLS_AFTER_S = 10.0
"""With a lease of 45 s a unit whose worker hangs comes back within a minute. What waits gives a sign each second.
Planning and the database's answers are silent for a few seconds at most; 45 s of silence cost a lease, not 10."""


class Heartbeat:
    """Renews a lease until it is closed. A context manager; :meth:`beat` tells it that the work gets on.

    It has a connection of its own. Where the server does not answer it tries on: the lease may still be there when the
    server is back. Signs are also those of :mod:`fp8tune.alive`, of the thread that opened this. Work that gives none
    for ``stalls_after_s`` is taken to hang, and its lease is left to end.
    """

    def __init__(
        self,
        db: str,
        lease: Lease,
        *,
        stalls_after_s: float = STALLS_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._db, self._lease, self._clock = db, lease, clock
        self.stalls_after_s, self._every_s = stalls_after_s, lease.seconds / RENEWALS
        self._last_sign = clock()
        self._is_lost = False
        self._ended, self._open = threading.Event(), contextlib.ExitStack()
        self._thread = threading.Thread(target=self._run, name="fp8tune lease", daemon=True)

    def __enter__(self) -> Self:
        self._open.enter_context(alive.heard(self._sign))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        self._ended.set()
        self._thread.join(self._lease.seconds)

    def beat(self) -> None:
        """The work got on. Raises LeaseLostError where another worker has the unit."""
        self._sign()
        if self._is_lost:
            raise LeaseLostError(f"unit {self._lease.unit.key} of {self._lease.unit.kernel} is another worker's now")

    def _sign(self) -> None:
        self._last_sign = self._clock()

    @property
    def is_stalled(self) -> bool:
        """Whether the work has given no sign for too long."""
        return self._clock() - self._last_sign > self.stalls_after_s

    def _run(self) -> None:
        store: Store | None = None
        try:
            while not self._ended.wait(self._every_s):
                if self.is_stalled:
                    continue
                try:
                    store = store or Store.open(self._db, wait=True)
                    store.renew_lease(self._lease)
                except LeaseLostError:
                    self._is_lost = True
                    return
                except DatabaseError:  # the next try may reach the server, with a connection of its own
                    _close(store)
                    store = None
        finally:
            _close(store)


def _close(store: Store | None) -> None:
    if store is not None:
        with contextlib.suppress(DatabaseError):  # of a server that is gone
            store.close()
