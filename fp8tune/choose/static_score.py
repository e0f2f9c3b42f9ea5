"""What a config that was only compiled is expected to cost, and how far that can be trusted.

The cost is what a tile takes that the best imaginable config would not, each part in units of the time that its bytes
take at full bandwidth. It knows no times: it ranks the configs of one kernel on one arch, nothing else. How well it
does is measured where there are both, on :data:`CALIBRATED_ON`; a kernel whose first choice there loses no less than
its declared default is better served with the default.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fp8tune.choose.ranking import Candidates, all_candidates, usable
from fp8tune.records import Code, Evidence, Facts, KernelVersion, Kind, NamedInts, Status
from fp8tune.stats import geomean, rank_correlation
from fp8tune_kernels.arches import ARCHES, Arch

CALIBRATED_ON = "sm_90"
"""The arch with measured rows of every kernel."""

# The constants are round numbers, chosen once for all kernels on an H100 and not fitted per kernel. Chosen without the
# family of a kernel (its like-named ones), they lead to the same decision for it: see the README on static facts.
LINE_BYTES = 128
"""A warp that asks for fewer neighbouring bytes pays for a cache line all the same."""
BYTES_IN_FLIGHT = 16 * 1024
"""Bytes an SM must have asked for to hide the memory's latency: bandwidth of an SM x latency (Little's law)."""
INSTRUCTIONS_PER_KIB = 13_100
"""What an SM can issue while memory delivers 1,024 bytes a thread: 4 warps a clock, 10 bytes loaded a clock."""
SHARED_INSTRUCTION = 40
"""Issue slots of one access to shared memory: many are narrow and meet in the same bank."""
LONE_BLOCK = 2.0
"""What an SM loses that holds one block, which loads or computes but not both; two blocks lose half of it."""
SPILLED_BYTES = 100
"""Spilling as many bytes doubles the cost."""
TOP = 5


@dataclass(frozen=True)
class Ranked:
    """A config that compiles, with its static cost: less is better, and it is no time."""

    config: NamedInts
    cost: float
    facts: Facts


@dataclass(frozen=True)
class Calibration:
    """How the static ranking of one kernel does where its configs were measured too. Slowdowns are against the best."""

    kernel: str
    arch: str
    device: str
    problems: int
    configs: int
    """Compiled, and timed on every problem."""
    rank_correlation: float
    """Spearman's, of cost and time; the mean over problems."""
    top1_slowdown: float
    """Of the config the static ranking puts first; geometric mean over problems."""
    top5_slowdown: float
    """Of the best of its first five."""
    default_slowdown: float
    """Of the kernel's declared default."""

    @property
    def is_trusted(self) -> bool:
        """Whether the static first choice loses less than the default."""
        return self.top1_slowdown < self.default_slowdown


def cost(facts: Facts, num_warps: int, arch: Arch) -> float | None:
    """The static cost of a config; None where its machine code was not read."""
    code = facts.code
    if code is None:
        return None
    blocks = max(1, code.resident_warps // num_warps)
    blocks_in_grid = min(blocks, max(code.programs / arch.multiprocessors, 0.2))  # few programs leave SMs empty
    in_flight = blocks_in_grid * num_warps * arch.warp_size * max(code.tile_bytes, 1)
    parts = 1 + _partial_lines(code) + max(code.passes - 1, 0) + BYTES_IN_FLIGHT / in_flight
    parts += (code.instructions_per_kib + SHARED_INSTRUCTION * code.shared_per_kib) / INSTRUCTIONS_PER_KIB
    parts += LONE_BLOCK / blocks_in_grid
    return parts * (1 + (facts.spill_bytes or 0) / SPILLED_BYTES)


def _partial_lines(code: Code) -> float:
    """Two of three bytes are loaded, bf16, and one stored, fp8; a run that is not known costs nothing."""
    load = LINE_BYTES / code.load_run_bytes if code.load_run_bytes else 0.0
    store = LINE_BYTES / code.store_run_bytes if code.store_run_bytes else 0.0
    return 2 / 3 * load + 1 / 3 * store


def ranking(static: Iterable[Evidence]) -> list[Ranked]:
    """The configs of one kernel version on one arch that compile, the least cost first.

    Of every input layout counts the problem that most configs were compiled for; the cost is the geometric mean over
    layouts, of configs that compile for all of them.
    """
    layouts: dict[str, dict[NamedInts, dict[NamedInts, Evidence]]] = {}
    for entry in static:
        if entry.status is Status.OK and entry.facts.code is not None and _is_launchable(entry):
            shapes = layouts.setdefault(entry.problem.input_layout, {})
            shapes.setdefault(entry.problem.shape, {})[entry.config or NamedInts()] = entry
    fullest = [
        min(shapes.items(), key=lambda item: (-len(item[1]), item[0].canonical))[1] for shapes in layouts.values()
    ]
    common = set.intersection(*(set(found) for found in fullest)) if fullest else set()
    ranked = [_ranked(config, [found[config] for found in fullest]) for config in common]
    return sorted(ranked, key=lambda each: (each.cost, each.config.canonical))


def _is_launchable(entry: Evidence) -> bool:
    """Not so of a row that something else wrote: of an arch nobody knows, or a config without warps."""
    return entry.device.arch in ARCHES and (entry.config or NamedInts()).get("num_warps", 0) > 0


def rankings(evidence: Iterable[Evidence]) -> dict[str, list[Ranked]]:
    """Kernel -> :func:`ranking` of the version of it that was compiled last."""
    versions: dict[str, dict[KernelVersion, list[Evidence]]] = {}
    for entry in evidence:
        if entry.kind is Kind.STATIC and entry.version is not None:
            versions.setdefault(entry.problem.kernel, {}).setdefault(entry.version, []).append(entry)
    newest = {
        kernel: max(found.values(), key=lambda rows: max(row.newest for row in rows))
        for kernel, found in versions.items()
    }
    return {kernel: ranked for kernel, rows in newest.items() if (ranked := ranking(rows))}


def _ranked(config: NamedInts, entries: Sequence[Evidence]) -> Ranked:
    arch = ARCHES[entries[0].device.arch]
    costs = [cost(entry.facts, config["num_warps"], arch) for entry in entries]
    return Ranked(config, geomean(value for value in costs if value is not None), entries[0].facts)


def calibrations(evidence: Iterable[Evidence]) -> dict[str, Calibration]:
    """Kernel -> how the static ranking does on :data:`CALIBRATED_ON`, where it has both kinds of rows.

    Measured problems count that were swept to the end, on the device that has most of them, with the kernel version
    that was compiled.
    """
    here = [entry for entry in evidence if entry.device.arch == CALIBRATED_ON]
    static: dict[KernelVersion, list[Evidence]] = {}
    for entry in here:
        if entry.kind is Kind.STATIC and entry.version is not None:
            static.setdefault(entry.version, []).append(entry)
    measured: dict[tuple[KernelVersion | None, str], list[Candidates]] = {}
    for candidates in usable(all_candidates(entry for entry in here if entry.kind is Kind.MEASURED)):
        measured.setdefault((candidates.entries[0].version, candidates.device.name), []).append(candidates)
    found: dict[str, Calibration] = {}
    for (version, device), timed in sorted(measured.items(), key=lambda item: (-len(item[1]), item[0][1])):
        if version is not None and version in static and version.kernel not in found:
            calibration = _calibration(version, device, timed, ranking(static[version]))
            found |= {} if calibration is None else {version.kernel: calibration}
    return found


def _calibration(
    version: KernelVersion, device: str, timed: Sequence[Candidates], ranked: Sequence[Ranked]
) -> Calibration | None:
    def slowdown(config: NamedInts) -> float:
        return geomean(candidates.slowdown(config) for candidates in timed)

    both = [each for each in ranked if all(each.config in candidates.times_us for candidates in timed)]
    if len(both) < TOP or any(version.default not in candidates.times_us for candidates in timed):
        return None
    costs = [each.cost for each in both]
    correlations = [
        rank_correlation(costs, [candidates.times_us[each.config] for each in both]) for candidates in timed
    ]
    return Calibration(
        kernel=version.kernel,
        arch=CALIBRATED_ON,
        device=device,
        problems=len(timed),
        configs=len(both),
        rank_correlation=math.fsum(correlations) / len(correlations),
        top1_slowdown=slowdown(both[0].config),
        top5_slowdown=min(slowdown(each.config) for each in both[:TOP]),
        default_slowdown=slowdown(version.default),
    )


@dataclass(frozen=True)
class Choice:
    """A config for an arch that nobody timed the kernel on."""

    config: NamedInts
    is_default: bool
    comment: str
    """What it rests on, for the table."""


def choose(static: Sequence[Evidence], default: NamedInts, calibration: Calibration | None) -> Choice | None:
    """The first by static cost where that is trusted, else the default; None where no config was compiled in full.

    ``static``: the rows of one kernel version on one arch. A default that does not compile there, or spills, gives way.
    """
    ranked = ranking(static)
    if not ranked:
        return None
    fits = any(each.config == default and not each.facts.spill_bytes for each in ranked)
    if calibration is not None and calibration.is_trusted:
        return Choice(ranked[0].config, False, f"static, compiled and not run: {_record(calibration)}")
    why = "the static cost is not calibrated" if calibration is None else _record(calibration)
    if fits:
        return Choice(default, True, f"default, compiled and not run: {why}")
    return Choice(ranked[0].config, False, f"static, compiled and not run: the default does not fit, {why}")


def _record(calibration: Calibration) -> str:
    top1, default = (100 * (slowdown - 1) for slowdown in (calibration.top1_slowdown, calibration.default_slowdown))
    return f"on {calibration.device} the first by static cost loses {top1:.1f} %, the default {default:.1f} %"


def as_json(calibration: Calibration) -> Mapping[str, object]:
    """A calibration as ``static-report --format json`` prints it and the JSON beside a table keeps it."""
    fields = {name: getattr(calibration, name) for name in Calibration.__dataclass_fields__}
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}
    return {**rounded, "trusted": calibration.is_trusted}
