"""Which rows the table of an arch has, and why the others are left out.

Measured problems that were swept to the end give one row a lookup key, from the device of the arch with the most
problems. Another device gets a row of its own only where that one loses more than 2 % on it. The *fallback row*, for
any other shape, is the robust config. Kernels for which the nearest key's row loses less on held-out shapes are named.
What the committed table has of all this stays until it is beaten by the keep band. A published config timed another
implementation: it is taken only for keys that nobody measured, and only if our kernel compiles with it there and spills
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from fp8tune.adapter import NO_TABLES, CurrentTables, compiled_studies, nearest_of, studies_of
from fp8tune.records import Device, Evidence, KernelVersion, Kind, NamedInts, Status
from fp8tune.stats.decide import PLAN
from fp8tune.stats.means import geomean, grouped
from fp8tune.stats.rank import competing
from fp8tune.stats.shared import HeldOut, choose_shared, hold_out, prefers_nearest
from fp8tune.stats.study import Result, Study
from fp8tune.store.layers import Reader
from fp8tune_kernels import tables

DEVICE_LOSS = 1.02
"""A device of the arch gets its own row where the shared config is slower than its best by more than this."""


class Basis(StrEnum):
    """What a row rests on, the better evidence first."""

    MEASURED = "measured"
    """On the arch: on the row's own device, or on another of the same arch where the row names none."""
    SIMULATED = "simulated"
    """On the simulated clock."""
    PUBLISHED = "published"
    """Printed by others, and compiled here without spills."""


@dataclass(frozen=True)
class TableRow:
    """One row of a table with the evidence for it."""

    kernel: str
    device: str
    """Empty: for every device of the arch."""
    key: NamedInts | None
    """None: for every shape that has no row."""
    config: NamedInts
    problems: tuple[tuple[Study, float], ...] = ()
    """The problems it was chosen on: the best there, and this config's own time in microseconds."""
    worst_slowdown: float | None = None
    """None where nothing was timed."""
    other_implementation: bool = False
    basis: Basis = Basis.MEASURED
    held_out: Sequence[HeldOut] = ()
    """Of a fallback row: what lookups lose on each measured shape without it, by this row or the nearest."""

    @property
    def plain(self) -> tables.Row:
        """As a lookup reads it."""
        key = None if self.key is None else tuple(sorted(self.key.items()))
        return self.kernel, self.device, key, tuple(self.config.items())


@dataclass(frozen=True)
class Selection:
    """A table before it is text."""

    rows: tuple[TableRow, ...]
    comments: Mapping[str, tuple[str, ...]]
    """Kernel -> what its rows rest on."""
    notices: tuple[str, ...]
    nearest: tuple[str, ...]
    """Kernels whose nearest row loses less on shapes held out than the fallback row."""


def evidence_for(store: Reader, arch: str) -> list[Evidence]:
    """Read all that is stored of an arch."""
    return store.evidence(arch=arch, keep=competing)


def select(evidence: Iterable[Evidence], arch: str, tables: CurrentTables = NO_TABLES) -> Selection:
    """Select the rows of an arch from its evidence, without what the interpreter or the simulator says."""
    of_arch = [item for item in evidence if item.device.arch == arch]
    kinds = (Kind.SIMULATED,) if arch == "simulated" else (Kind.MEASURED, Kind.PUBLISHED)
    static = grouped(compiled_studies(of_arch), lambda study: study.problem.kernel)
    timed = studies_of((item for item in of_arch if item.kind in kinds), tables)
    by_kernel = grouped(timed, lambda study: study.problem.kernel)
    builders = [
        _Builder(kernel, arch, by_kernel.get(kernel, []), static.get(kernel, []), tables)
        for kernel in sorted({*static, *by_kernel})
    ]
    for builder in builders:
        builder.build()
    return Selection(
        rows=tuple(row for builder in builders for row in builder.rows),
        comments={builder.kernel: tuple(builder.comments) for builder in builders},
        notices=tuple(f"{builder.kernel}: {line}" for builder in builders for line in builder.notices),
        nearest=tuple(builder.kernel for builder in builders if builder.takes_nearest),
    )


@dataclass
class _Builder:
    """The rows of one kernel on one arch."""

    kernel: str
    arch: str
    studies: Sequence[Study]
    static: Sequence[Study]
    tables: CurrentTables
    rows: list[TableRow] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def build(self) -> None:
        """Fill rows, comments and notices."""
        published = [candidates for candidates in self.studies if candidates.kind is Kind.PUBLISHED]
        measured = [candidates for candidates in self.studies if candidates.kind is not Kind.PUBLISHED]
        devices = grouped(self._exportable(measured), lambda candidates: candidates.device.name)
        devices = dict(sorted(devices.items(), key=lambda group: (-len(group[1]), group[0])))  # most problems first
        if devices:
            self._add_measured(devices)
        if published:
            self._add_published(published)
        if devices:
            self._add_fallback(devices)  # held out against all rows that have a key

    @property
    def takes_nearest(self) -> bool:
        """Whether a lookup of a key without a row is better off with the nearest."""
        held_out = [item for row in self.rows for item in row.held_out]
        current = self.tables.takes_nearest(self.kernel, self.arch)
        return prefers_nearest(held_out, current) if held_out else bool(current)

    # Measured

    def _exportable(self, timed: Sequence[Study]) -> list[Study]:
        """What was swept to the end, by a version that the kernel's newest code can be launched like."""
        complete = [study for study in timed if study.is_usable]
        self._notice_left_out(timed, complete, "not swept to the end")
        current = _newest_version([*self.static, *timed])
        launchable = [candidates for candidates in complete if current and _same_interface(candidates, current)]
        self._notice_left_out(complete, launchable, "rows of an older kernel with other axes or keys")
        return launchable

    def _notice_left_out(self, before: Sequence[Study], after: Sequence[Study], why: str) -> None:
        left_out = [candidates for candidates in before if candidates not in after]
        if left_out:
            shape = left_out[0].problem.shape
            more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
            self.notices.append(f"{shape}{more} not exported, {why}: run fp8tune sweep --kernel {self.kernel} again")

    def _add_measured(self, devices: Mapping[str, Sequence[Study]]) -> None:
        timed = [candidates for found in devices.values() for candidates in found]
        for key, of_key in sorted(grouped(timed, _key).items(), key=lambda item: item[0].canonical):
            shared: NamedInts | None = None
            for name, found in grouped(of_key, lambda candidates: candidates.device.name).items():
                if shared is None:
                    shared = self._config_for(found)
                    self.rows.append(_row(self.kernel, "", key, shared, found))
                elif _loses(shared, found, self._device_loss(found[0].device, key)):
                    self.rows.append(_row(self.kernel, name, key, self._config_for(found), found))
        word = "simulated" if timed[0].kind is Kind.SIMULATED else "measured"
        self.comments.append(f"{word} on {', '.join(devices)}")

    def _config_for(self, found: Sequence[Study]) -> NamedInts:
        """Of several problems under one key, the config of least mean slowdown; of one, its pick."""
        shared = choose_shared(found, math.inf, found[0].current) if len(found) > 1 else None
        if len(found) > 1 and shared is None:
            self.notices.append(f"no config ran on all {len(found)} problems of {_key(found[0])}: the first decides")
        return shared.config if shared else found[0].pick.config or NamedInts()

    def _add_fallback(self, devices: Mapping[str, Sequence[Study]]) -> None:
        (_, first), *others = devices.items()
        best = choose_shared(first, current=self.tables.config(self.kernel, Device(self.arch), None))
        if best is None:
            self.notices.append("no config ran on every problem, so unseen shapes get the declared default")
            return
        keyed = _with_key(self.rows)
        served: list[Study] = []
        for name, found in others:
            device = found[0].device
            own = choose_shared(found, current=self.tables.config(self.kernel, device, None))
            bound = self._device_loss(device, None)
            if own is not None and _loses(best.config, found, bound * own.mean):
                row = _row(self.kernel, name, None, own.config, found)
                self.rows.append(replace(row, held_out=hold_out(found, (), nearest_of(keyed))))
            else:
                served += found
        row = _row(self.kernel, "", None, best.config, first)
        self.rows.append(replace(row, held_out=hold_out(first, served, nearest_of(keyed))))

    def _device_loss(self, device: Device, key: NamedInts | None) -> float:
        """The slowdown above which a device has a row of its own; one that it has stays by the keep band."""
        has_one = self.tables.own_config(self.kernel, device, key) is not None
        return DEVICE_LOSS / (1 + PLAN.keep_band) if has_one else DEVICE_LOSS

    # Published

    def _add_published(self, published: Sequence[Study]) -> None:
        named = [study for study in published if study.is_usable]
        keyed = [candidates for candidates in named if candidates.lookup_key is not None]
        rows: list[TableRow] = []
        if keyed:
            rows = self._published_rows(keyed)
            outcome = "compiled without spills" if rows else f"none exported, run {self._compile_command}"
            entries = [entry for candidates in keyed for entry in candidates.results if entry.config is not None]
        else:
            unnamed = "no config is named, evidence only"
            outcome = "the kernel is not declared here, evidence only" if named else unnamed
            self.notices.append(f"published rows are not exported: {outcome}")
            entries = [entry for candidates in published for entry in candidates.results]
        sources = sorted({entry.source for entry in entries})
        self.comments.append(f"published by {', '.join(sources)}, other implementation: {outcome}")
        self.rows += rows

    @property
    def _compile_command(self) -> str:
        return f"fp8tune sweep --arch {self.arch} --kernel {self.kernel}"

    def _published_rows(self, keyed: Sequence[Study]) -> list[TableRow]:
        taken = {row.key for row in self.rows}
        as_timed: list[TableRow] = []  # without the axes that only ours has
        rows: list[TableRow] = []
        for key, found in grouped(keyed, _key).items():
            if key not in taken and (proven := self._proven(key, config := self._config_for(found), found)):
                as_timed.append(_row(self.kernel, "", key, config, found))
                rows.append(replace(as_timed[-1], config=proven, other_implementation=True))
        if not taken and (best := choose_shared(keyed)) and (proven := self._proven(None, best.config, keyed)):
            row = _row(self.kernel, "", None, best.config, keyed)
            held_out = hold_out(keyed, (), nearest_of(_with_key(as_timed)))  # slow, so only for a row that is exported
            rows.append(replace(row, config=proven, other_implementation=True, held_out=held_out))
        return rows

    def _proven(self, key: NamedInts | None, config: NamedInts, found: Sequence[Study]) -> NamedInts | None:
        """The published config with the axes that only ours has, if our kernel compiles with it and spills nothing."""
        version, compiled = self._compiled
        completed = version.complete(config) if version else config
        facts = [item for item in compiled if (item.config or NamedInts()) == completed]
        if not facts:
            why = f"was not compiled: run {self._compile_command}"
        elif any(item.status is not Status.OK or item.facts.spill_bytes != 0 for item in facts):
            why = "does not compile or spills"
        else:
            return _in_declared_order(completed, version)
        where = "any other shape" if key is None else str(key)
        as_published = _in_declared_order(config, found[0].version)
        self.notices.append(f"the published config for {where} is not exported, {as_published} {why}")
        return None

    @cached_property
    def _compiled(self) -> tuple[KernelVersion | None, Sequence[Result]]:
        """The newest version that was compiled for the arch, and its results."""
        version = _newest_version(self.static)
        return version, [result for study in self.static if study.version == version for result in study.results]


def _row(kernel: str, device: str, key: NamedInts | None, config: NamedInts, found: Sequence[Study]) -> TableRow:
    covering = [candidates for candidates in found if config in candidates.times_us]
    return TableRow(
        kernel=kernel,
        device=device,
        key=key,
        config=_in_declared_order(config, found[0].version),
        problems=tuple((candidates, candidates.times_us[config]) for candidates in covering),
        worst_slowdown=max(candidates.slowdowns[config] for candidates in covering),
        basis=Basis(found[0].kind),
    )


def _with_key(rows: Iterable[TableRow]) -> list[tables.Row]:
    return [row.plain for row in rows if row.key is not None]


def _in_declared_order(config: NamedInts, version: KernelVersion | None) -> NamedInts:
    declared = [name for name, _ in version.axes] if version else []
    names = [*(name for name in declared if name in config), *sorted(set(config) - set(declared))]
    return NamedInts([(name, config[name]) for name in names])


def _loses(config: NamedInts, found: Sequence[Study], bound: float) -> bool:
    """Whether a config is slower than the best by more than the bound there, or never ran there."""
    if any(config not in candidates.times_us for candidates in found):
        return True
    return geomean(candidates.slowdowns[config] for candidates in found) > bound


def _key(candidates: Study) -> NamedInts:
    return candidates.lookup_key or NamedInts()


def _same_interface(candidates: Study, current: KernelVersion) -> bool:
    version = candidates.version
    if version is None or candidates.lookup_key is None:
        return False
    return {name for name, _ in version.axes} == {name for name, _ in current.axes} and version.key == current.key


def _newest_version(studies: Iterable[Study]) -> KernelVersion | None:
    """Return the version whose rows were stored last."""
    stamped = [(study.newest, study.version.source_hash, study.version) for study in studies if study.version]
    return max(stamped, key=lambda item: item[:2])[2] if stamped else None
