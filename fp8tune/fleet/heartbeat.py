"""Renewing leases in a thread, as long as the work makes progress."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from fp8tune import alive
from fp8tune.errors import DatabaseError
from fp8tune.store.results import Store
from fp8tune.store.units import RENEWALS, Lease

# Silence after which work counts as hanging: its lease then ends, and with a lease of 45 s the unit comes back within a
# minute. Waits with a time limit give a sign each second (:mod:`fp8tune.alive`).
STALLS_AFTER_S = 10.0


@dataclass
class Heartbeat:
    """Signs of life of the work on units."""

    stalls_after_s: float = STALLS_AFTER_S
    sign_s: float = field(default_factory=time.monotonic)

    def sign(self) -> None:
        """Note that the work makes progress."""
        self.sign_s = time.monotonic()

    @contextlib.contextmanager
    def renewing(self, db: str, leases: Collection[Lease], every_s: float) -> Iterator[None]:
        """Renew leases inside the block, also such as are added there, unless the work stalls."""
        ended = threading.Event()

        def renew() -> None:
            with contextlib.ExitStack() as stack:
                store: Store | None = None
                while not ended.wait(every_s):
                    is_stalled = time.monotonic() - self.sign_s > self.stalls_after_s
                    for lease in [] if is_stalled else list(leases):
                        try:
                            # a connection of its own, for the work may be in a transaction; after an error a new one
                            store = store or stack.enter_context(Store.open(db, wait=True))
                            store.renew_lease(lease)
                        except DatabaseError:  # also for a lease that was lost, as the next write of a result finds
                            store = None

        thread = threading.Thread(target=renew, name="fp8tune lease", daemon=True)
        with alive.heard(self.sign):
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join(RENEWALS * every_s)
