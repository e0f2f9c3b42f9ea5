"""Names a user may type, checked before anything is opened, built or written from them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

from fp8tune.errors import UsageError, unknown
from fp8tune.revisions import source
from fp8tune.revisions.loading import load_spec
from fp8tune.store.results import Store
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.catalog import KERNELS


def check_arch(arch: str, store: Store | None = None) -> None:
    """Raise UsageError, naming the near matches, unless ``arch`` is known or has rows in the database."""
    known = {*ARCHES, *(store.arches() if store is not None else ())}
    if arch not in known:
        raise unknown("arch", arch, known)


def stored_kernels(kernels: Sequence[str] | None, store: Store) -> list[str]:
    """The kernels to read: those named, or all that have rows. Raises UsageError for a name nobody knows.

    A kernel is named as for a sweep, and by references too: see :func:`declared_name`.
    """
    stored = store.kernels()
    if not kernels:
        return [name for name in dict.fromkeys((*KERNELS, *stored)) if name in stored]
    return list(dict.fromkeys(_stored_kernel(name, stored) for name in kernels))


def _stored_kernel(kernel: str, stored: Collection[str]) -> str:
    """The name under which the rows of a kernel are kept, which its name or reference stands for."""
    if ":" in kernel:
        return declared_name(kernel)
    if kernel not in {*KERNELS, *stored}:
        raise unknown("kernel", kernel, {*KERNELS, *stored})
    return kernel


def declared_name(reference: str) -> str:
    """The name that a ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE`` declares: from its text, which imports no torch,
    or else by loading it. Raises UsageError where there is no such spec."""
    with contextlib.suppress(UsageError):
        return source.kernel_name(reference, source.installed(reference))
    return load_spec(reference).name
