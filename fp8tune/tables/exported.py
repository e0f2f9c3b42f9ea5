"""Configs of a table that an export wrote, read without running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8tune.errors import UsageError, one_line
from fp8tune.lookups import Declared, look_up
from fp8tune.records import Device, KernelVersion, NamedInts
from fp8tune.replay.configs import encoded
from fp8tune.replay.recording import Config, Kernel, Launch
from fp8tune_kernels.pinning import tables
from fp8tune_kernels.runtime import user_tables
from fp8tune_kernels.runtime.chain import Step
from fp8tune_kernels.tables import Table

Key = tuple[Any, ...]


@dataclass(frozen=True)
class ExportedTable:
    """A launch table of an arch, or the file of one kernel that ``export --for python`` wrote."""

    kernels: frozenset[str]
    rows: Table = field(default_factory=Table)
    devices: Mapping[str, Mapping[Key, Mapping[str, Any]]] = field(default_factory=dict)
    """Device name -> tuning key -> arguments of ``triton.Config``."""
    codes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Kernel -> hashes of the code that was measured, where they are known."""

    def is_changed(self, version: KernelVersion) -> bool:
        """Return True if a kernel is not the one that was measured."""
        return version.source_hash not in (self.codes.get(version.kernel) or {version.source_hash})

    def config(
        self, version: KernelVersion, device: Device, key: NamedInts, recorded: tuple[Kernel, Launch] | None
    ) -> NamedInts | None:
        """Return the config that a launch takes from the table, or None if it has none for the launch.

        Raises UsageError for a config that the recorded kernel cannot have.
        """
        if version.kernel not in self.kernels:
            return None
        if self.rows.rows:
            result = look_up(Declared.from_version(version), device, key, self.rows)
            return None if result.step is Step.DEFAULT else result.config
        keys = [tuple(key.values())]
        if recorded is not None:
            keys = [launch.key for launch in (recorded[1], *recorded[1].shared)]
        rows = self.devices.get(device.name, {})
        try:
            for arguments in (rows[key] for key in keys if key in rows):
                if recorded is not None:
                    return encoded(recorded[0], Config(**arguments))
                options = {name: value or 0 for name, value in arguments.items() if name != "kwargs"}
                return NamedInts({**version.default, **arguments["kwargs"], **options})
        except (TypeError, ValueError, KeyError) as error:
            reason = f"a config of {version.kernel} does not suit the kernel ({one_line(error, 100)})"
            raise UsageError(f"{reason}: export it again") from None
        return None


def read_table(path: Path) -> ExportedTable:
    """Read a file of ``export`` or ``export --for python``. Raises UsageError for any other file, or a damaged one."""
    problem = "cannot be read"
    try:
        text = path.read_bytes().decode()
        problem = "is no table"
        if "\nKERNEL = " not in text:
            table = user_tables.parsed(text)
            pairs = [(row[0], code) for row, code in zip(table.rows, table.codes, strict=True) if code]
            codes = {kernel: frozenset(code for name, code in pairs if name == kernel) for kernel, _ in pairs}
            return ExportedTable(frozenset(row[0] for row in table.rows), table, codes=codes)
        names = tables.parsed(text)
        codes = {names["KERNEL"]: frozenset(names.get("CODE", {}).values()) - {""}}
        return ExportedTable(frozenset(codes), devices=names["TABLE"], codes=codes)
    except (OSError, ValueError, TypeError) as error:
        advice = "name a file that fp8tune export or fp8tune export --for python wrote"
        raise UsageError(f"{path} {problem} ({one_line(error, 100)}): {advice}") from None
