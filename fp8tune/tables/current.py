"""Configs in use today: those of a table, of a recording, or a kernel's default."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fp8tune import lookups
from fp8tune.errors import DatabaseError
from fp8tune.records import Device, KernelVersion, NamedInts, Problem
from fp8tune.replay import recording
from fp8tune.replay.configs import encoded
from fp8tune.replay.recording import Kernel, Launch
from fp8tune.stats.study import Origin, Today
from fp8tune_kernels.runtime.chain import Step
from fp8tune_kernels.runtime.user_tables import installed
from fp8tune_kernels.tables import Key, Table, table


class CurrentTables:
    """Launch tables whose configs stay until others are proven faster."""

    def __init__(self, table: Callable[[str, str], Table]) -> None:
        """Read the table of an arch and a version of Triton with ``table``, once; an empty version is any."""
        self._table = functools.cache(table)
        self._configs = functools.cache(lambda *place: {row[:3]: NamedInts(row[3]) for row in self._table(*place).rows})

    def config(self, kernel: str, device: Device, key: NamedInts | None) -> NamedInts | None:
        """Return the row's config for a lookup key, or the fallback config for None; None if there is no such row.

        A device's own row comes before the arch's. A key without a row has none, whatever a lookup gives there: that
        was chosen without it.
        """
        configs = self._configs(device.arch, device.triton)
        return configs.get((kernel, device.name, _items(key))) or configs.get((kernel, "", _items(key)))

    def has_own_row(self, kernel: str, device: Device, key: NamedInts | None) -> bool:
        """Return True if the row for this key is for this device alone."""
        return bool(device.name) and (kernel, device.name, _items(key)) in self._configs(device.arch, device.triton)

    def takes_nearest(self, kernel: str, arch: str) -> bool | None:
        """Return True if keys without a row take the nearest key's row, or None if there is no fallback row."""
        return kernel in self._table(arch, "").nearest if self.config(kernel, Device(arch), None) is not None else None


NO_TABLES = CurrentTables(lambda arch, triton: Table())
SHIPPED = CurrentTables(lambda arch, triton: table(arch, triton or None))
INSTALLED = CurrentTables(lambda arch, triton: installed(arch, triton or None))
"""The user's own tables over the shipped ones."""


def completed(config: NamedInts | None, version: KernelVersion | None) -> NamedInts | None:
    """Return a table's config with the default of every axis that its row leaves out."""
    return config if config is None or version is None else NamedInts({**version.default, **config})


def find_today(version: KernelVersion, device: Device, key: NamedInts, without: Today | None) -> Today | None:
    """Return the config that a launch of a key uses now: a table's, else the one that it uses ``without`` tables."""
    result = lookups.look_up(lookups.Declared.from_version(version), device, key)
    if result.step is not Step.DEFAULT:
        return Today(result.config, Origin.OWN_TABLE if result.is_own else Origin.SHIPPED_TABLE)
    return without


def recorded_launch(document: str) -> tuple[Kernel, Launch]:
    """Parse the stored JSON of a recorded launch. Raises DatabaseError if the text is damaged."""
    try:
        parts = json.loads(document)
        return recording.from_json(parts["kernel"], Kernel), recording.from_json(parts["launch"], Launch)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DatabaseError(f"a recorded launch is damaged ({error}): record the kernel and sweep it again") from None


@dataclass(frozen=True)
class Recorded:
    """Configs of a problem's launches when they were recorded."""

    today: Today | None
    """Config of all of them; None if launches that share a config were made with several."""
    default: NamedInts | None = None
    """Config of the first launch of a bare kernel, which declares no default."""


def recorded_configs(documents: Mapping[Problem, str]) -> dict[Problem, Recorded]:
    """Return what run-time tuning or the program chose for each recorded problem, where it is known."""
    result = {}
    for problem, document in documents.items():
        # A damaged launch and a config outside of the declared list leave the default as today's config.
        with contextlib.suppress(DatabaseError, ValueError):
            kernel, launch = recorded_launch(document)
            chosen = [item.configs[0] if item.configs else item.config for item in (launch, *launch.shared)]
            if used := [encoded(kernel, config) for config in chosen if config is not None]:
                origin = Origin.PROGRAM if launch.configs else Origin.RECORDING
                today = Today(used[0], origin) if len({*used}) == 1 else None
                result[problem] = Recorded(today, used[0] if launch.configs else None)
    return result


def _items(key: NamedInts | None) -> Key | None:
    return None if key is None else tuple(sorted(key.items()))
