"""Code trees: a worker that takes the kernels of another checkout than the tuner's own.

Workers are forked from a server that has torch and Triton but no kernel. A worker takes the kernels of one tree, once.
Only ``fp8tune_kernels.spec``, the interface of kernels and tuner, stays the tuner's own.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import fp8tune_kernels

P = ParamSpec("P")
T = TypeVar("T")

KERNELS = "fp8tune_kernels"


@dataclass(frozen=True)
class Tree:
    """A checkout to take kernels from, and where their binaries are kept apart from other trees'."""

    name: str  # as the user gave the revision: for messages
    folder: Path
    cache: Path
    roots: tuple[str, ...] = ("",)  # folders below ``folder`` that packages are imported from, the first one first


_current: Tree | None = None


def within(tree: Tree | None, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a worker that has, or takes now, the kernels of ``tree``. None: the installed ones."""
    global _current
    if tree is not None and tree != _current:
        if _current is not None:
            raise RuntimeError(f"this process has the kernels of {_current.name}: {tree.name} needs one of its own")
        _current = tree
        tree.cache.mkdir(parents=True, exist_ok=True)
        os.environ["TRITON_CACHE_DIR"] = os.environ["TMPDIR"] = str(tree.cache)
        tempfile.tempdir = None  # read TMPDIR again, so that files of a killed compiler go with the cache
        os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
        roots = [tree.folder / root for root in tree.roots]
        sys.path[:0] = [str(root) for root in roots]
        if own := [str(root / KERNELS) for root in roots if (root / KERNELS).is_dir()]:
            fp8tune_kernels.__path__ = own
            for name in [name for name in sys.modules if name.startswith(f"{KERNELS}.") and name != f"{KERNELS}.spec"]:
                del sys.modules[name]
                vars(fp8tune_kernels).pop(name.removeprefix(f"{KERNELS}."), None)
    return function(*args, **kwargs)


def taken() -> Tree | None:
    """Return the tree whose kernels this process has; None for the installed ones."""
    return _current
