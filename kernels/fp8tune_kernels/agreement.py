"""Agreement of ranks on what is pinned: compared once, through the store at which the ranks met.

Each rank publishes its facts unless another rank was first, and compares them with those of the first: one request,
which waits for nobody. So ranks that launch other kernels, or none, cannot hold each other up.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

from .identity import UnknownCodeError
from .identity import code_hash as identity_of

Facts = Mapping[str, str]
"""Thing to agree on -> its hash or version."""

KEY = "fp8tune/pinned"
VERSIONED = ("torch", "triton", "fp8tune-kernels")


class Ranks:
    """Ranks of this job."""

    def __init__(self) -> None:
        self.is_pending = os.environ.get("WORLD_SIZE", "1") not in ("", "1")
        """True in a job of several ranks that have not been compared. Then launches go the slow way, which compares."""
        self._is_compared = False

    def compare(self, facts: Callable[[], Facts]) -> str:
        """Return the differences between this rank's facts and those of the first rank here; empty if they agree.

        Does nothing before ``torch.distributed`` is initialized, and after the ranks agreed.
        """
        distributed = None if self._is_compared else sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return ""
        store, rank = distributed.distributed_c10d._get_default_store(), distributed.get_rank()
        own = dict(facts())
        first_rank, first = json.loads(store.compare_set(KEY, "", json.dumps([rank, own])))
        if difference := differences(first, own):
            return f"rank {rank} and rank {first_rank} differ in {difference}"
        self._is_compared, self.is_pending = True, False
        return ""


ranks = Ranks()


def differences(first: Facts, second: Facts) -> str:
    """Return the names of facts that differ, with values that a reader can compare."""
    texts = []
    for name in sorted({*first, *second}):
        if first.get(name) != second.get(name):
            is_version = name in VERSIONED
            texts.append(f"{name} ({second.get(name)}, {first.get(name)})" if is_version else name)
    return ", ".join(texts)


def versions() -> Facts:
    """Return the versions of what makes code of a kernel and reads tables."""
    return {name: _version(name) for name in VERSIONED}


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # on PYTHONPATH
        return str(getattr(sys.modules.get(distribution), "__version__", ""))


def hashed(text: str | bytes) -> str:
    """Return 12 hex digits of a text."""
    return sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:12]


def code_hash(kernel: str, file: Path | None = None) -> str:
    """Return the identity of a kernel's code; empty where there is no source.

    ``file``: of a module that cannot be found by its name.
    """
    try:
        return identity_of(kernel.partition(".<locals>")[0], file)  # of a function that makes kernels: all of it
    except UnknownCodeError:
        return ""
