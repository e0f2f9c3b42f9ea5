"""What the committed tables hold: what must be beaten before a table changes.

A key that a table leaves out has the kernel's declared default for an incumbent, whatever a lookup gives there: that
was chosen without it. Imports no torch, as the tables do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from fp8tune.records import Device, NamedInts
from fp8tune_kernels.runtime.user_tables import installed
from fp8tune_kernels.tables import Key, Table, table


class Incumbents:
    """The tables of all arches, as what is chosen for them asks."""

    def __init__(self, table: Callable[[str], Table]) -> None:
        self._table = functools.cache(table)

        @functools.cache
        def configs(arch: str) -> Mapping[tuple[str, str, Key | None], NamedInts]:
            return {row[:3]: NamedInts(row[3]) for row in self._table(arch).rows}

        self._configs = configs

    def config(self, kernel: str, device: Device, key: NamedInts | None) -> NamedInts | None:
        """The config for a lookup key (None: for any other shape); None where the table has none.

        A device's own row comes before the arch's.
        """
        return self.own_config(kernel, device, key) or self._config(kernel, device.arch, "", key)

    def own_config(self, kernel: str, device: Device, key: NamedInts | None) -> NamedInts | None:
        """The same, but of a row of the device's own alone."""
        return self._config(kernel, device.arch, device.name, key) if device.name else None

    def takes_nearest(self, kernel: str, arch: str) -> bool | None:
        """Whether unseen keys take the row of the nearest key; None where the table has nothing for them."""
        held = self._config(kernel, arch, "", None)
        return None if held is None else kernel in self._table(arch).nearest

    def _config(self, kernel: str, arch: str, device: str, key: NamedInts | None) -> NamedInts | None:
        return self._configs(arch).get((kernel, device, None if key is None else tuple(sorted(key.items()))))


NO_INCUMBENTS = Incumbents(lambda arch: Table())
"""No table is committed: the declared defaults are the incumbents."""

COMMITTED = Incumbents(table)
"""The shipped tables."""

INSTALLED = Incumbents(installed)
"""What lookups go by: the user's own tables over the shipped ones."""
