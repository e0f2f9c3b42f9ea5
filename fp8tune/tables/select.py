"""Selection of a launch table's rows from decided studies.

Each lookup key gets a row with the pick of the device that has the most problems. Another device gets its own row if
that pick would cost it more than 2 %. A fallback row serves all other keys. Today's rows stay until proven slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fp8tune.records import Device, KernelVersion, Kind, NamedInts, Status
from fp8tune.stats.decide import PLAN
from fp8tune.stats.means import geomean, group_by
from fp8tune.stats.shared import HeldOut, Nearest, choose_shared, hold_out, prefers_nearest
from fp8tune.stats.study import Study
from fp8tune.tables.current import NO_TABLES, CurrentTables
from fp8tune.tables.launch_table import Entry, LaunchTable
from fp8tune_kernels.catalog import SPANS
from fp8tune_kernels.runtime.chain import nearest
from fp8tune_kernels.tables import Key, Row

DEVICE_LOSS = 1.02
"""Slowdown above which a device gets a row of its own."""


@dataclass(frozen=True)
class Selection:
    """Selected rows of one arch."""

    table: LaunchTable
    known: Mapping[str, frozenset[str]] = field(default_factory=dict)  # kernel -> devices and publications with results
    notices: tuple[str, ...] = ()  # omitted results, and how to include them


def select(
    studies: Sequence[Study], compiled: Sequence[Study], arch: str, tables: CurrentTables = NO_TABLES
) -> Selection:
    """Select the rows of an arch from decided studies.

    A published config is selected only if its ``compiled`` results have no spills. ``tables`` are those used today.
    """
    kinds = (Kind.SIMULATED,) if arch == "simulated" else (Kind.MEASURED, Kind.PUBLISHED)
    of_arch = (study for study in studies if study.device.arch == arch and study.kind in kinds)
    by_kernel = group_by(of_arch, lambda study: study.problem.kernel)
    static = group_by((study for study in compiled if study.device.arch == arch), lambda study: study.problem.kernel)
    parts = [_KernelRows(kernel, arch, group, static.get(kernel, []), tables) for kernel, group in by_kernel.items()]
    entries = tuple(entry for part in parts for entry in part.entries)
    return Selection(
        LaunchTable(arch, entries, frozenset(part.kernel for part in parts if part.takes_nearest())),
        {kernel: frozenset().union(*map(_origins, group)) for kernel, group in by_kernel.items()},
        tuple(f"{part.kernel}: {notice}" for part in parts for notice in part.notices),
    )


class _KernelRows:
    """Rows of one kernel on one arch."""

    def __init__(
        self, kernel: str, arch: str, studies: Sequence[Study], static: Sequence[Study], tables: CurrentTables
    ) -> None:
        self.kernel, self.arch, self.tables, self.static = kernel, arch, tables, static
        self.entries, self.notices, self.held_out = list[Entry](), list[str](), list[HeldOut]()
        published = [study for study in studies if study.kind is Kind.PUBLISHED]
        own = [study for study in studies if study.kind is not Kind.PUBLISHED]
        exportable = self._exportable(own, _newest_version([*static, *studies]))
        groups = group_by(exportable, lambda study: study.device.name).items()
        devices = dict(sorted(groups, key=lambda item: (-len(item[1]), item[0])))  # most problems first
        measured = [study for group in devices.values() for study in group]
        for key, same_key in group_by(measured, _lookup_key).items():
            self._add_rows(key, group_by(same_key, lambda study: study.device.name))
        if published:
            self._add_published_rows(published)
        if devices:
            self._add_fallbacks(devices)  # comes last because it compares with all rows that have a key

    def takes_nearest(self) -> bool:
        """Return True if keys without a row should take the nearest key's row."""
        rule = self.tables.takes_nearest(self.kernel, self.arch)
        return prefers_nearest(self.held_out, rule) if self.held_out else bool(rule)

    def _exportable(self, measured: Sequence[Study], newest: KernelVersion | None) -> list[Study]:
        """Return the complete studies whose kernel version has the same axes and keys as the newest one."""
        exportable, unfinished, older = list[Study](), list[Study](), list[Study]()
        for study in measured:
            is_alike = newest is not None and _launch_interface(study.version) == _launch_interface(newest)
            is_right = is_alike and study.lookup_key is not None
            (unfinished if not study.is_usable else exportable if is_right else older).append(study)
        reasons = {"not swept to the end": unfinished, "rows of an older kernel with other axes or keys": older}
        for reason, omitted in reasons.items():
            if omitted:
                more = f" and {len(omitted) - 1} more" if len(omitted) > 1 else ""
                advice = f"run fp8tune sweep --kernel {self.kernel} again"
                self.notices.append(f"{omitted[0].problem.shape}{more} not exported, {reason}: {advice}")
        return exportable

    def _add_rows(self, key: NamedInts, devices: Mapping[str, Sequence[Study]]) -> None:
        (_, first), *others = devices.items()
        shared = self._choose_config(first)
        self._add("", key, shared, first)
        for device, group in others:
            if _mean_slowdown(shared, group) > self._largest_loss(device, key):
                self._add(device, key, self._choose_config(group), group)

    def _choose_config(self, studies: Sequence[Study]) -> NamedInts:
        """Return the pick of a single study, or the config with the least mean slowdown on several with one key."""
        if len(studies) > 1:
            if shared := choose_shared(studies, math.inf, studies[0].current):
                return shared.config
            self.notices.append(f"no config ran on all problems of {_lookup_key(studies[0])}: the first decides")
        return studies[0].choice.pick

    def _largest_loss(self, device: str, key: NamedInts | None) -> float:
        """Return the slowdown above which a device gets its own row. It is lower if the device has one already."""
        has_row = self.tables.has_own_row(self.kernel, Device(self.arch, device), key)
        return DEVICE_LOSS / (1 + PLAN.keep_band) if has_row else DEVICE_LOSS

    def _add_fallbacks(self, devices: Mapping[str, Sequence[Study]]) -> None:
        (_, first), *others = devices.items()
        best = choose_shared(first, current=self.tables.config(self.kernel, Device(self.arch), None))
        if best is None:
            self.notices.append("no config ran on every problem, so unseen shapes get the declared default")
            return
        keyed = nearest_of([entry.row for entry in self.entries if entry.key is not None])
        served: list[Study] = []
        for device, group in others:
            own = choose_shared(group, current=self.tables.config(self.kernel, Device(self.arch, device), None))
            if own and _mean_slowdown(best.config, group) > self._largest_loss(device, None) * own.mean:
                self._add(device, None, own.config, group)
                self.held_out += hold_out(group, [], keyed)
            else:
                served += group
        self._add("", None, best.config, first)
        self.held_out += hold_out(first, served, keyed)

    def _add_published_rows(self, published: Sequence[Study]) -> None:
        """Add published configs, which were timed with other code, for keys without measurements."""
        named = [study for study in published if study.is_usable]
        keyed = [study for study in named if study.lookup_key is not None]
        if not keyed:
            reason = "the kernel is not declared here" if named else "no config is named"
            self.notices.append(f"published rows are not exported: {reason}, evidence only")
            return
        measured = {entry.key for entry in self.entries}
        for key, group in group_by(keyed, _lookup_key).items():
            if _sorted_items(key) not in measured:
                self._add_published(key, self._choose_config(group), group)
        if not measured and (best := choose_shared(keyed)):
            self._add_published(None, best.config, keyed)

    def _add_published(self, key: NamedInts | None, config: NamedInts, studies: Sequence[Study]) -> None:
        """Add a published config if it compiles here without spills. Axes that only our kernel has are set to off."""
        version = _newest_version(self.static)
        complete = version.complete(config) if version else config
        compiled = (study for study in self.static if study.version == version)
        results = [result for study in compiled for result in study.results if result.config == complete]
        if results and all(result.status is Status.OK and result.facts.spill_bytes == 0 for result in results):
            self._add("", key, config, studies)
            self.entries[-1] = self.entries[-1]._replace(config=_declared_order(complete, version))
            return
        command = f"fp8tune sweep --arch {self.arch} --kernel {self.kernel}"
        reason = "does not compile or spills" if results else f"was not compiled: run {command}"
        where = key or "any other shape"
        self.notices.append(f"the published config for {where} is not exported, {config} {reason}")

    def _add(self, device: str, key: NamedInts | None, config: NamedInts, studies: Sequence[Study]) -> None:
        origins = frozenset().union(*(_origins(study) for study in studies if config in study.times_us))
        items = None if key is None else _sorted_items(key)
        config_items = _declared_order(config, studies[0].version)
        oldest = min((study.newest, study.source_hash) for study in studies)[1]  # which a launch may refuse
        self.entries.append(Entry(self.kernel, device, items, config_items, tuple(sorted(origins)), oldest))


def nearest_of(rows: Sequence[Row]) -> Nearest:
    """Return a function that finds the config of the nearest key among the rows of a kernel."""

    def nearest_config(study: Study, omitted: frozenset[NamedInts]) -> NamedInts | None:
        keys = set(map(_sorted_items, omitted))
        comparable = [row for row in rows if row[1] in (study.device.name, "") and row[2] not in keys]
        row = nearest(_sorted_items(_lookup_key(study)), comparable, SPANS.get(study.problem.kernel), study.default)
        return NamedInts(row[3]) if row else None

    return nearest_config


def _mean_slowdown(config: NamedInts, studies: Sequence[Study]) -> float:
    """Return the geometric mean slowdown of a config, or infinity if a study has no time for it."""
    slowdowns = [study.slowdowns.get(config, math.inf) for study in studies]
    return math.inf if math.inf in slowdowns else geomean(slowdowns)


def _origins(study: Study) -> frozenset[str]:
    """Return the device of a study, and the publications of its configs."""
    return frozenset({study.device.name, *(r.source for r in study.results if r.config is not None)} - {""})


def _declared_order(config: NamedInts, version: KernelVersion | None) -> Key:
    declared = [name for name, _ in version.axes if name in config] if version else []
    return tuple((name, config[name]) for name in dict.fromkeys([*declared, *sorted(config)]))


def _launch_interface(version: KernelVersion | None) -> object:
    return version and ({name for name, _ in version.axes}, version.key)


def _newest_version(studies: Sequence[Study]) -> KernelVersion | None:
    """Return the kernel version whose results were stored last."""
    stamped = [(study.newest, study.source_hash, study.version) for study in studies if study.version]
    return max(stamped, key=lambda item: item[:2])[2] if stamped else None


def _lookup_key(study: Study) -> NamedInts:
    return study.lookup_key or NamedInts()


def _sorted_items(key: NamedInts) -> Key:
    return tuple(sorted(key.items()))
