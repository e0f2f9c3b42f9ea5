"""Renewing leases in a thread, as long as the work makes progress."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator

from fp8tune import alive
from fp8tune.errors import DatabaseError
from fp8tune.store.results import Store
from fp8tune.store.units import RENEWALS, Lease

# Silence after which work counts as hanging: its lease then ends, and with a lease of 45 s the unit comes back within a
# minute. Waits with a time limit give a sign each second (:mod:`fp8tune.alive`).
STALLS_AFTER_S = 10.0


@contextlib.contextmanager
def renewing(
    db: str, leases: Collection[Lease], every_s: float, stalls_after_s: float = STALLS_AFTER_S
) -> Iterator[Callable[[], None]]:
    """Renew leases inside the block, also such as are added there, unless the work stalls.

    Yields a function that notes that the work makes progress.
    """
    ended, sign_s = threading.Event(), time.monotonic()

    def sign() -> None:
        nonlocal sign_s
        sign_s = time.monotonic()

    def renew() -> None:
        with contextlib.ExitStack() as stack:
            store: Store | None = None
            while not ended.wait(every_s):
                for lease in [] if time.monotonic() - sign_s > stalls_after_s else list(leases):
                    try:
                        # a connection of its own, for the work may be in a transaction; after an error a new one
                        store = store or stack.enter_context(Store.open(db, wait=True))
                        store.renew_lease(lease)
                    except DatabaseError:  # also for a lease that was lost, as the next write of a result finds
                        store = None

    thread = threading.Thread(target=renew, name="fp8tune lease", daemon=True)
    with alive.heard(sign):
        thread.start()
        try:
            yield sign
        finally:
            ended.set()
            thread.join(RENEWALS * every_s)
