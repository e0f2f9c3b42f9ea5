"""Sizes to recheck: the config in use on each, what older versions measured, and the rivals that are known from it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8tune import names, registry
from fp8tune.errors import MachineError, UsageError
from fp8tune.measure.backends import backend_for
from fp8tune.options import RecheckOptions, SweepOptions
from fp8tune.records import Device, KernelVersion, Kind, NamedInts, Problem
from fp8tune.replay.loading import load_spec
from fp8tune.replay.spec import RecordedSpec
from fp8tune.stats.decide import PLAN, decide_study
from fp8tune.stats.means import group_by
from fp8tune.stats.rank import answering
from fp8tune.stats.study import Origin, Study
from fp8tune.store.layers import Layers, Reader
from fp8tune.sweeping import planning
from fp8tune.sweeping.planning import Plan, ProblemPlan
from fp8tune.tables.current import recorded_launch
from fp8tune.tables.exported import ExportedTable, read_table
from fp8tune_kernels.runtime.chain import distance

RIVALS = 8  # known configs of a size that are timed beside the one in use, the default and the fallback
NEIGHBOURS = 2  # nearest sizes of the kernel whose best configs are rivals, too
TIED = 1 + PLAN.tie_band


@dataclass(frozen=True, eq=False)
class Target:
    """A size with the config in use."""

    size: ProblemPlan
    """The size with all its configs; the one in use is ``current``."""
    current: NamedInts
    old: Study | None
    """Decided study of another Triton, driver or kernel version on a GPU of this name."""
    known: tuple[NamedInts, ...]
    """The config in use, the default, the table's fallback, and the best rivals of older sweeps."""
    fresh: Study | None = None
    """Decided study with a confirmation that was made with the versions installed here."""
    peers: Study | None = None
    """Study of another GPU, with all other facts of the device as here, and times of all known configs."""


def planned(options: RecheckOptions, reader: Reader, command: str = "") -> tuple[Plan, list[Target]]:
    """Return a plan of the sizes to recheck, and the sizes. Its back end only compiles if this GPU has another arch.

    Raises:
        UsageError: There is nothing to recheck.
        MachineError: There is no GPU, and no arch is named.
    """
    table = None if options.table is None else read_table(Path(options.table))
    recording, arch = options.recording, options.arch
    here, _ = backend_for(None, None)
    if not here.times and arch is None:
        raise MachineError("no GPU was found: name the arch whose machine code to compare with --arch sm_90")
    studies = _studies(reader, arch or here.device.arch)
    is_here = here.times and arch in (None, here.device.arch)
    if is_here:
        studies = [study for study in studies if study.device.name == here.device.name]
    kernels = options.kernel
    if recording is None and not kernels:
        stored = {study.problem.kernel for study in studies}
        kernels = tuple(name for name in registry.kernels() if name in stored and (not table or name in table.kernels))
    if recording is None and not kernels:
        where = here.device.name if is_here else arch
        text = f"nothing to recheck: no results of {where}" + (f" for the kernels of {options.table}" if table else "")
        raise UsageError(f"{text}; run fp8tune sweep, or add --recording run.json for kernels of your own")
    sweep = SweepOptions(kernel=kernels, recording=recording, budget_s=options.budget_s, gpus=options.gpus)
    if not is_here:
        sweep = replace(sweep, arch=arch, timer="do_bench")  # a simulated GPU does not keep other archs from compiling
    short = planning.planned(sweep, command)
    key = hashlib.sha256(f"{short.key} recheck {options.table and Path(options.table).read_bytes()!r}".encode())
    by_kernel = group_by(studies, lambda study: study.problem.kernel)
    problems = dict[str, list[Problem]]()
    for reference in short.options.kernel:
        spec = load_spec(reference)
        if not isinstance(spec, RecordedSpec):
            version = planning.version_of(reference)
            usable = [study.problem for study in by_kernel.get(spec.name, ()) if _fits(study, version)]
            problems[spec.name] = list(dict.fromkeys(usable))
    plan = replace(planning.expanded(short, stored=problems), key=key.hexdigest()[:16], is_partial=True)
    versions = {size.version.kernel: size.version for size in plan.problems}
    changed = [name for name, version in versions.items() if table is not None and table.is_changed(version)]
    notice = "was measured with other code: its configs are measured again with the code as it is now"
    plan = replace(plan, notices=(*plan.notices, *(f"{options.table}: {name} {notice}" for name in changed)))
    targets = [_target(size, plan, by_kernel.get(size.version.kernel, []), table) for size in plan.problems]
    chosen = [target for target in targets if target is not None]
    if not chosen:
        raise UsageError("nothing to recheck: no table has a config for these sizes; run fp8tune sweep and export")
    return plan, chosen


def _studies(reader: Reader, arch: str) -> list[Study]:
    """Return the decided studies of an arch, of the own and of the shipped results: the own ones hide nothing here."""
    if arch != "simulated":
        names.check_arch(arch, reader)
    stores = (reader.own, reader.shipped) if isinstance(reader, Layers) else (reader,)
    kinds = (Kind.MEASURED, Kind.SIMULATED)
    return [decide_study(study) for store in stores for study in store.studies(None, arch, kinds) if study.results]


def _fits(study: Study, version: KernelVersion) -> bool:
    """Return True if the study's kernel had the axes and the lookup key of today's."""
    axes = {name for name, _ in version.axes}
    return study.version is not None and study.version.key == version.key and {*study.default} == axes


def _target(size: ProblemPlan, plan: Plan, studies: Sequence[Study], table: ExportedTable | None) -> Target | None:
    """Return a size with its config in use; None if no table, earlier sweep or recording chose one."""
    device, version = plan.backend.device, size.version
    same_kernel = [study for study in studies if _fits(study, version)]
    own = [study for study in same_kernel if study.problem == size.problem]
    old = [study for study in own if not _is_current(study, device, version)]
    new = [study for study in own if _is_current(study, device, version) and study.has_finals and study.complete]
    before, confirmed = next(iter(answering(old)), None), next(iter(answering(new)), None)
    current = _config_in_use(size, device, table, before or confirmed)
    if current is None:
        return None
    size = replace(size, current=current)
    if confirmed is not None and current in confirmed.finals:
        confirmed = decide_study(replace(confirmed, current=current, launched=size.default))
        return Target(size, current, before, (current,), confirmed)
    known = [current, size.default, *filter(None, [size.fallback])]
    rivals = _rivals(size, own, same_kernel)
    known = [config for config in known if {*config} == {name for name, _ in version.axes}]
    known += [config for config in rivals if config not in known][:RIVALS]
    known = [*dict.fromkeys(known)]
    there, here = [study for study in own if study.source_hash == version.source_hash], plan.device_of(size)
    peers = [study for study in there if study.device == replace(here, uuid_hash=study.device.uuid_hash) != here]
    # The config in use may have failed because of that GPU.
    whole = [study for study in peers if current in study.coarse_us and {*known} <= {*study.coarse_us, *study.failures}]
    return Target(size, current, before, tuple(known), peers=max(whole, key=lambda study: study.newest, default=None))


def _is_current(study: Study, device: Device, version: KernelVersion) -> bool:
    there = study.device.triton, study.device.driver, study.source_hash
    return there == (device.triton, device.driver, version.source_hash)


def _config_in_use(
    size: ProblemPlan, device: Device, table: ExportedTable | None, old: Study | None
) -> NamedInts | None:
    """Return the config of the named table, else today's of the tables in use, else the pick of an earlier sweep."""
    spec, today, recorded = load_spec(size.reference), size.today, None
    if table is not None:
        if isinstance(spec, RecordedSpec) and (document := spec.document(size.problem)):
            recorded = recorded_launch(document)
        return table.config(size.version, device, size.lookup_key, recorded)
    if today is not None and today.origin in (Origin.OWN_TABLE, Origin.SHIPPED_TABLE):
        return today.config
    if old is not None:
        return old.choice.pick
    return today.config if today is not None and today.origin in (Origin.RECORDING, Origin.PROGRAM) else None


def _rivals(size: ProblemPlan, own: Iterable[Study], kernel: Iterable[Study]) -> list[NamedInts]:
    """Return the configs that were ever within the tie band here, the fastest first, and those of the nearest sizes."""
    best: dict[NamedInts, float] = {}
    for study in own:
        for config, slowdown in study.slowdowns.items():
            best[config] = min(slowdown, best.get(config, slowdown))
    key, others = tuple(sorted(size.lookup_key.items())), dict[NamedInts, list[Study]]()
    for study in kernel:
        if study.problem != size.problem and study.lookup_key is not None and study.has_finals:
            others.setdefault(study.lookup_key, []).append(study)
    near = sorted(others, key=lambda place: (distance(key, tuple(sorted(place.items()))), place.canonical))
    picks = [study.choice.pick for place in near[:NEIGHBOURS] for study in others[place]]
    tied = sorted((config for config, slowdown in best.items() if slowdown <= TIED), key=lambda config: best[config])
    from_others = sorted(dict.fromkeys(picks), key=lambda config: best.get(config, TIED))
    return [config for config in dict.fromkeys([*tied[: RIVALS - 2], *from_others, *tied]) if config]
