"""What the committed tables hold: what must be beaten before a table changes.

A key that a table leaves out has the kernel's declared default for an incumbent, whatever a lookup gives there: that
was chosen without it. Imports no torch, as the tables do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from fp8tune.records import Device, NamedInts
from fp8tune_kernels.runtime.user_tables import installed
from fp8tune_kernels.tables import Table, table

Place = tuple[str, str, tuple[tuple[str, int], ...] | None]
"""Kernel, device name or ``""``, sorted items of the lookup key or None."""


@dataclass(frozen=True)
class Incumbents:
    """The tables of all arches, as what is chosen for them asks."""

    held: Callable[[str], Held]
    """Arch -> what its table holds."""

    def config(self, kernel: str, device: Device, key: NamedInts | None) -> NamedInts | None:
        """The config for a lookup key (None: for any other shape); None where the table has none.

        A device's own row comes before the arch's.
        """
        own = self.own_config(kernel, device, key)
        return own or self.held(device.arch).configs.get(_place(kernel, "", key))

    def own_config(self, kernel: str, device: Device, key: NamedInts | None) -> NamedInts | None:
        """The same, but of a row of the device's own alone."""
        return self.held(device.arch).configs.get(_place(kernel, device.name, key)) if device.name else None

    def takes_nearest(self, kernel: str, arch: str) -> bool | None:
        """Whether unseen keys take the row of the nearest key; None where the table has nothing for them."""
        held = self.held(arch)
        return kernel in held.table.nearest if (kernel, "", None) in held.configs else None


@dataclass(frozen=True)
class Held:
    """One table."""

    table: Table

    @cached_property
    def configs(self) -> Mapping[Place, NamedInts]:
        """Its rows by their places."""
        return {(kernel, device, key): NamedInts(config) for kernel, device, key, config in self.table.rows}


def _place(kernel: str, device: str, key: NamedInts | None) -> Place:
    return kernel, device, None if key is None else tuple(sorted(key.items()))


NO_INCUMBENTS = Incumbents(lambda arch: Held(Table()))
"""No table is committed: the declared defaults are the incumbents."""

COMMITTED = Incumbents(functools.cache(lambda arch: Held(table(arch))))
"""The shipped tables."""

INSTALLED = Incumbents(functools.cache(lambda arch: Held(installed(arch))))
"""What lookups go by: the user's own tables over the shipped ones."""
