"""Names a user may type, checked before anything is opened, built or written from them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from fp8tune import registry
from fp8tune.errors import UsageError, unknown
from fp8tune.revisions import source
from fp8tune.revisions.reference import KernelReference
from fp8tune.store.layers import Reader
from fp8tune_kernels.arches import ARCHES


def check_arch(arch: str, store: Reader | None = None) -> None:
    """Raise UsageError, naming the near matches, unless ``arch`` is known or has rows in the database."""
    known = {*ARCHES, *(store.arches() if store is not None else ())}
    if arch not in known:
        raise unknown("arch", arch, known)


def stored_kernels(kernels: Sequence[str] | None, store: Reader) -> list[str]:
    """The kernels to read: those named (see :func:`declared_name`), or all with rows. Raises UsageError if unknown."""
    stored = store.kernels()
    known = dict.fromkeys((*registry.kernels(), *stored))
    if not kernels:
        return [name for name in known if name in stored]
    names = []
    for text in kernels:
        name = KernelReference.parse(text).kernel
        if ":" not in name and name not in known:
            raise unknown("kernel", name, known)
        names.append(name if name in known else declared_name(text))
    return list(dict.fromkeys(names))


def declared_name(reference: str) -> str:
    """The name that a ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE`` has in rows: from its text, which imports no torch,
    or else by loading it. Raises UsageError where there is no such spec or kernel."""
    with contextlib.suppress(UsageError):
        return source.kernel_name(reference)
    from fp8tune.replay.loading import load_spec  # slow to import, and show needs none of it

    return load_spec(reference).name
