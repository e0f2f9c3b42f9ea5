"""The results database as the rest of fp8tune sees it: records go in, records come out, connections never leave."""

from __future__ import annotations

from fp8tune.store.frames import Framing
from fp8tune.store.merge import Merging
from fp8tune.store.picks import Deciding
from fp8tune.store.prune import Pruning
from fp8tune.store.read import COPY_CEILING, Tally
from fp8tune.store.units import Queueing

__all__ = ["COPY_CEILING", "Store", "Tally"]


class Store(Merging, Pruning, Deciding, Framing, Queueing):
    """An open results database. A context manager; one thread at a time."""
