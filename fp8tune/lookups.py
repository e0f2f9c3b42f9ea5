"""Lookup of a launch config in the tables, from a kernel's declaration alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from fp8tune.errors import UsageError
from fp8tune.records import Device, KernelVersion, NamedInts
from fp8tune_kernels.catalog import SPANS
from fp8tune_kernels.runtime import user_tables
from fp8tune_kernels.runtime.chain import Step, taken
from fp8tune_kernels.spec import KernelSpec, Span
from fp8tune_kernels.tables import Table, overlay, table


@dataclass(frozen=True)
class Declared:
    """Declaration of a stored kernel version, which needs no import of the kernel."""

    name: str
    default: NamedInts
    span: Span | None
    key: tuple[str, ...]
    axes: Mapping[str, tuple[int, ...]]

    @classmethod
    def from_version(cls, version: KernelVersion) -> Declared:
        """Return the declaration of a version. A kernel from elsewhere has no span here."""
        span = SPANS.get(version.kernel)
        return cls(version.kernel, version.default, span, version.key, dict(version.axes))


@dataclass(frozen=True)
class Lookup:
    """Config that a launch would use, with the step of the fallback chain that gave it."""

    kernel: str
    arch: str
    device: str
    """The GPU's name that rows of one device are looked for by; empty for any of the arch."""
    key: NamedInts
    """Key that is looked up."""
    config: NamedInts
    """What is launched, with every axis."""
    step: Step
    """Where the config comes from: ``key``, ``nearest``, ``fallback`` or ``default``."""
    row_key: NamedInts | None = None
    """The key of the row that was taken; None for the fallback row and the default."""
    row_device: str = ""
    """The device that the row is for; empty for any of the arch."""
    is_own: bool = False
    """Whether the row is of the user's own table, not of the shipped one."""

    def __str__(self) -> str:
        why = {
            Step.KEY: "the row of its key",
            Step.NEAREST: f"the row of the nearest key, {self.row_key}",
            Step.FALLBACK: "the row for any other shape",
            Step.DEFAULT: "the declared default, no row suits",
        }[self.step]
        why += f" in {'your own' if self.is_own else 'the shipped'} table" if self.step is not Step.DEFAULT else ""
        return f"{self.kernel}, {self.key} on {self.device or self.arch}: {self.config} ({why})"


def look_up(spec: Declared | KernelSpec, where: Device, key: NamedInts, exported: Table | None = None) -> Lookup:
    """Look a key up on a device, in the user's own table over the shipped one, or in another table.

    Raises:
        UsageError: The user's table cannot be read.
    """
    declared = cast(KernelSpec, spec)  # these functions read no more of it than Declared has
    try:
        own = user_tables.of_kernel(declared, user_tables.user_table(where.arch) if exported is None else exported)
    except ValueError as error:
        raise UsageError(str(error)) from None
    shipped = table(where.arch, where.triton or None) if exported is None else Table()
    rows = overlay(own, shipped) if own.rows else shipped
    step, row = taken(declared, key, rows, where.name)
    config = NamedInts({**spec.default, **dict(row[3] if row else ())})
    if row is None:
        return Lookup(spec.name, where.arch, where.name, key, config, step)
    measured = None if row[2] is None else dict(row[2])
    row_key = None if measured is None else NamedInts({name: measured[name] for name in key if name in measured})
    return Lookup(spec.name, where.arch, where.name, key, config, step, row_key, row[1], row in own.rows)
