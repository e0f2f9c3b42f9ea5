"""Names a user may type, checked before anything is opened, built or written from them."""

from __future__ import annotations

from collections.abc import Sequence

from fp8tune.errors import unknown
from fp8tune.store.results import Store
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.catalog import KERNELS


def check_arch(arch: str, store: Store | None = None) -> None:
    """Raise UsageError, naming the near matches, unless ``arch`` is known or has rows in the database."""
    known = {*ARCHES, *(store.arches() if store is not None else ())}
    if arch not in known:
        raise unknown("arch", arch, known)


def stored_kernels(kernels: Sequence[str] | None, store: Store) -> list[str]:
    """The kernels to read: those named, or all that have rows. Raises UsageError for a name nobody knows."""
    stored = store.kernels()
    if not kernels:
        return [name for name in dict.fromkeys((*KERNELS, *stored)) if name in stored]
    for name in kernels:
        if name not in {*KERNELS, *stored}:
            raise unknown("kernel", name, {*KERNELS, *stored})
    return list(kernels)
