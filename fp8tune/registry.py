"""Kernels that packages register under entry points."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

KERNELS = "fp8tune.kernels"
"""Group of kernels: a name, and the ``module:ATTRIBUTE`` of its :class:`~fp8tune_kernels.spec.KernelSpec`."""


@functools.cache
def kernels() -> Mapping[str, str]:
    """Return the import paths of all registered kernels by name, those of this checkout first."""
    paths: dict[str, str] = {}
    package = find_spec("fp8tune_kernels")
    project = Path(package.origin if package and package.origin else "").parent.parent / "pyproject.toml"
    if project.is_file():  # a checkout on PYTHONPATH has no metadata
        declared = tomllib.loads(project.read_text(encoding="utf-8"))["project"].get("entry-points", {})
        paths |= declared.get(KERNELS, {})
    for point in entry_points(group=KERNELS):
        # metadata of a checkout may be older than its files, and name kernels that are gone
        if not (project.is_file() and point.module.startswith("fp8tune_kernels.")):
            paths.setdefault(point.name, point.value)
    return paths
