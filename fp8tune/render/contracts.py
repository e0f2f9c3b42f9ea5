"""What programs read: every JSON object that a command prints, in one place. CSV has the same fields.

Scripts rely on names and types; new fields may come at any time. Times are microseconds, ``share`` is 0 to 1, ``ratio``
is a time divided by another, ``null`` is what was not measured or does not apply. ``shape`` and configs are objects of
integers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fp8tune.ceiling import ceiling_of
from fp8tune.records import Device, Problem, Published, Row, Status, Subject
from fp8tune.redaction import redacted

if TYPE_CHECKING:
    from pathlib import Path

    from fp8tune.bench import grouped
    from fp8tune.bench.cells import Timing
    from fp8tune.bench.kernels import Ceiling, Kernel
    from fp8tune.bench.kernels import Row as BenchRow
    from fp8tune.check.finding import Finding
    from fp8tune.check.lint import VariationResult
    from fp8tune.fleet.worker import QueueEvent
    from fp8tune.lookups import Lookup
    from fp8tune.stats.explanation import Explanation
    from fp8tune.stats.study import Study
    from fp8tune.store.prune import Pruned
    from fp8tune.store.results import Tally
    from fp8tune.store.units import Queue, QueuedSweep, UnitStatus
    from fp8tune.sweeping.calibrate import Calibration
    from fp8tune.tables.merge import Merged

Object = Mapping[str, object]

DTYPES = ("in_dtype", "fp8_dtype", "scale_mode")


def _fields(found: object, *names: str) -> Object:
    """Attributes under their own names; a shape or config as an object."""
    return {name: _plain(getattr(found, name)) for name in names}


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


def _device(device: Device, *versions: str) -> Object:
    return {"arch": device.arch, "device": device.name, **_fields(device, *versions)}


def _problem(problem: Problem, *more: str) -> Object:
    fields = _fields(problem, "shape", "routing", "input_layout", *more)
    return {name: None if value == "" else value for name, value in fields.items()}


def _subject(found: Row | Study | Subject, *more: str) -> Object:
    where = {"kernel": found.problem.kernel, **_device(found.device), "kind": found.kind}
    return {**where, **_problem(found.problem, *more)}


# sweep --json, show


def trial(row: Row) -> Object:
    """One trial, a line of ``sweep --json``. ``status`` is one of :class:`fp8tune.records.Status`; ``reason`` says why
    it is not ``ok``."""
    return {
        **_subject(row, *DTYPES),
        **_fields(row, "config"),
        **_fields(row.outcome, "status", "time_us", "reason"),
        **_fields(row, "stage", "round"),
    }


def winner(study: Study) -> Object:
    """The pick of one problem, ``show``: the fields of a trial, and what ranking adds. ``n`` is the number of processes
    or blocks that its time rests on, ``noise_floor`` a share of it. The runner-up is the next best config that was
    timed, in the stage ``runner_up_stage``; ``speedup`` is over ``today``, the config that a launch uses without the
    pick."""
    decision, rival, ceiling = study.choice, study.next_best, ceiling_of(study)
    return {
        **_subject(study, *DTYPES),
        **_fields(study.pick, "config"),
        "status": "ok",
        "time_us": decision.time_us,
        "reason": "",
        "ceiling_share": ceiling and ceiling.share,
        "n": decision.processes,
        "source": study.pick.source or None,
        "verdict": None if decision.verdict == "published" else decision.verdict,
        "noise_floor": study.noise,
        "runner_up": rival and dict(rival.config),
        "runner_up_us": rival and rival.time_us,
        "runner_up_stage": rival and str(rival.stage),
        "why_not_runner_up": str(study.precedence),
        "today": study.today and dict(study.today.config),
        "today_origin": study.today and str(study.today.origin),
        "speedup": study.speedup,
        **_fields(study.device, "timing", "codegen"),
    }


def bounded_winner(study: Study) -> Object:
    """The same where some kernel declares its operations or another check than ``exact``. ``bound`` is memory or
    compute: what ``ceiling_share`` is a share of."""
    ceiling, pick = ceiling_of(study), study.pick
    own = {"bound": ceiling and ceiling.bound, "flops": study.flops, "peak_flop_per_s": pick.peak_flop_per_s}
    return {**winner(study), **own, "check": pick.check}


def explanation(found: Explanation, lookup: Lookup | None) -> Object:
    """``explain``: the pick of one problem with everything behind it. ``slowdown`` and its bounds are ratios to the
    pick, in the same stage; those of ``pairs`` are of ``config`` to ``rival``."""
    from fp8tune.stats.explanation import reasons

    pairs = found.pairs
    places = [(i, j) for i in range(len(pairs.configs)) for j in range(len(pairs.configs)) if i != j] if pairs else []
    return {
        "winner": bounded_winner(found.study),
        "configs": [
            {
                **_fields(attempt, "config", "status", "stage", "time_us", "slowdown"),
                "interval": list(attempt.interval) if attempt.interval else None,
                "reason": attempt.reason,
            }
            for attempt in found.attempts
        ],
        "processes": found.study.choice.processes if pairs else 0,
        "pairs": [
            {
                "config": dict(pairs.configs[i]),
                "rival": dict(pairs.configs[j]),
                "slowdown": math.exp(pairs.mean[i, j]),
                "interval": [
                    bound if math.isfinite(bound) else None
                    for bound in (math.exp(pairs.lower[i, j]), math.exp(pairs.upper[i, j]))
                ],
            }
            for i, j in places
            if pairs
        ],
        "why": reasons(found),
        "lookup": lookup
        and {
            "key": dict(lookup.key),
            "passed": list(map(str, lookup.passed)),
            "step": str(lookup.step),
            "config": dict(lookup.config),
            "row_key": _plain(lookup.row_key),
            "row_device": lookup.row_device,
            "is_own": lookup.is_own,
        },
    }


def tally(found: Tally) -> Object:
    """The configs of one problem counted by outcome, ``show --failed``. ``status``, ``reason`` and ``config`` are those
    of the first that failed, wrong bytes before all else."""
    config, failure = next(iter(found.failures.items()), (None, None))
    ok, wrong, pruned = (found.counts[status] for status in (Status.OK, Status.WRONG, Status.PRUNED))
    return {
        **_subject(found.subject, "fp8_dtype", "scale_mode"),
        "configs": len(found.outcomes),
        "ok": ok,
        "wrong": wrong,
        "other": len(found.outcomes) - ok - wrong - pruned,
        "pruned": pruned,
        "config": _plain(config),
        "status": failure and failure.status,
        "reason": failure.reason if failure else "",
    }


def published(row: Published) -> Object:
    """What others published of one operation, ``show --op`` and ``bench --op``."""
    return {
        "row": "published",
        **_fields(row, "operation", "source"),
        "device": row.device.name,
        "arch": row.device.arch,
        **_fields(row, "recipe", "shape", "bf16_fwd_us", "scaled_fwd_us", "bf16_fwd_bwd_us", "scaled_fwd_bwd_us"),
        "speedup_fwd_bwd": row.speedup,
        **_fields(row, "note", "impossible"),
    }


# calibrate, lint, doctor


def imported(path: str, added: int, already_there: int) -> Object:
    """What became of one file of ``import``, a line: the rows that were new, and those that were there before."""
    return {"path": path, "added": added, "already_there": already_there}


def compacted(
    path: Path, before: int, after: int, pruned: Pruned, archive: Path | None, archive_bytes: int | None
) -> Object:
    """``compact``: what became of a database."""
    return {
        "path": redacted(str(path)),
        "bytes_before": before,
        "bytes_after": after,
        "results_removed": pruned.results,
        "trials_removed": pruned.trials,
        "results_kept": pruned.kept,
        "archive": None if archive is None else str(archive),
        "archive_bytes": archive_bytes,
    }


def forgotten(db: str, rows: Sequence[tuple[str, int]], removed: Mapping[str, int]) -> Object:
    """``forget``: each row that was named, and how many rows of each table went."""
    return {
        "database": redacted(db),
        "rows": [f"{table}:{id}" for table, id in rows],
        "removed": {name: count for name, count in removed.items() if count},
    }


def exported_table(path: str, state: str, merged: Merged) -> Object:
    """``export`` without ``--for``. ``state`` is written, unchanged, stale or up to date; the rest are numbers of rows,
    ``prunable`` those of ``unchanged`` that the database could give and does not."""
    names = ("added", "changed", "unchanged", "removed", "prunable")
    return {"path": path, "state": state, **{name: len(getattr(merged, name)) for name in names}}


def calibration(found: Calibration) -> Object:
    """``calibrate --json``; ``protocol`` has the fields of :class:`fp8tune.stats.decide.MeasuringPlan`."""
    return {**_device(found.device), "measured": found.values, "protocol": asdict(found.protocol)}


def variation(found: VariationResult) -> Object:
    """One varied argument of a key, ``lint``. ``slowdown`` and ``allowed`` are ratios."""
    problem = found.variation.problem
    return {
        "kernel": problem.kernel,
        "key": dict(found.subject.key),
        "argument": found.variation.argument,
        "value": varied_to(found),
        **_problem(problem, "scale_mode", "seed"),
        "config": dict(found.pick),
        "best_config": dict(found.best),
        **_fields(found, "slowdown", "allowed", "processes", "verdict"),
    }


def varied_to(found: VariationResult) -> int | str:
    """The value that ``lint`` gave the varied argument."""
    name, problem = found.variation.argument, found.variation.problem
    value: int | str = problem.shape[name] if name in problem.shape else getattr(problem, name)
    return value


def finding(found: Finding) -> Object:
    """``doctor --json``; ``level`` is ok, warning or error."""
    return {"level": str(found.level), "what": redacted(found.what), "fix": redacted(found.fix)}


# bench


def bench(kernels: Sequence[Kernel], ceiling: Ceiling, rivals: Sequence[str]) -> list[Object]:
    """``bench``: an object a problem, then one a kernel with its geometric means and the host time of one call on a
    64x64 input."""
    means = (
        {
            "row": "kernel",
            "kernel": kernel.name,
            "check": kernel.check,
            "geomean_ratio": {name: kernel.geomean(name) for name in rivals},
            "host": _timings(kernel.hosts),
        }
        for kernel in kernels
    )
    return [*(bench_row(row, ceiling) for kernel in kernels for row in kernel.rows), *means]


def bench_row(row: BenchRow, ceiling: Ceiling) -> Object:
    """One problem; a ratio above 1: ours is faster. A wrong output has its time, its reason and its shares of wrong
    bytes, and no ratio."""
    ours = row.timings["fp8tune"]
    return {
        "row": "problem",
        "kernel": row.problem.kernel,
        **_device(row.device, "torch", "triton"),
        **_problem(row.problem, *DTYPES, "seed"),
        **_fields(ours, "config"),
        "bytes_moved": row.bytes_moved,
        "time_us": ours.time_us,
        "reason": ours.reason,
        **_wrong_shares(ours),
        "gb_per_s": row.gb_per_s,
        "ceiling_us": ceiling.time_us(row),
        "ceiling_gb_per_s": ceiling.gb_per_s,
        "ceiling_share": ceiling.share(row),
        "bound": ceiling.bound(row),
        "flops": row.flops,
        "peak_flop_per_s": row.peak_flop_per_s,
        "ceiling_reason": row.copy.reason,
        "rivals": {
            name: {
                "time_us": timing.time_us,
                "ratio": row.ratio(name),
                "reason": timing.reason,
                **_wrong_shares(timing),
            }
            for name, timing in row.timings.items()
            if name != "fp8tune"
        },
    }


def _wrong_shares(timing: Timing) -> Object:
    """Of elements; null where nothing was compared."""
    checked = timing.checked
    return {
        "wrong_codes_share": checked.codes.share if checked else None,
        "wrong_scales_share": checked.scales.share if checked else None,
    }


def _timings(timings: Mapping[str, Any]) -> Object:
    return {name: _fields(timing, "time_us", "reason") for name, timing in timings.items()}


def grouped_row(row: grouped.Row) -> Object:
    """One problem of ``bench --op``: sizes in bytes, speedups above 1: bf16 is slower. An SQNR of null is exact or,
    beside a reason, nothing like the reference. ``steps`` are what was timed; ``fwd_bwd_us`` has the share of
    ``quantize_weights`` in the steps whose weights were quantized once. ``groups`` are sizes that were given.
    ``auto``: the precision that ``precision="auto"`` took."""
    operation = row.operation
    return {
        "row": operation.name,
        "recipe": operation.recipe,
        "emulated": row.is_emulated,
        **_device(row.device, "torch", "triton"),
        "layer": row.problem.label or None,
        **_fields(row.problem, "shape", "routing", "seed"),
        "groups": list(row.problem.sizes) or None,
        "padded": row.padded,
        "steps": [
            {"contender": who, "step": step, **_fields(timing, "time_us", "reason")}
            for (who, step), timing in row.steps.items()
        ],
        "fwd_bwd_us": {who: row.time_us(who, "fwd+bwd") for who in ("bf16", *operation.compared)},
        "speedups_fwd_bwd": {who: row.speedup("fwd+bwd", who) for who in operation.compared},
        "auto": row.auto,
        "sqnr_db": {who: _finite(timing.sqnr_db) for (who, _), timing in row.steps.items() if timing.sqnr_db},
        "speedup_fwd": row.speedup("fwd"),
        "speedup_fwd_bwd": row.speedup("fwd+bwd"),
        "torchao_speedup_fwd_bwd": row.speedup("fwd+bwd", "torchao"),
        **_fields(row, "gemms_us", "bound", "bound_share"),
        "parts": _timings(row.parts),
        **_fields(row, "rest_us", "peak_bytes"),
    }


def grouped_means(rows: Sequence[grouped.Row]) -> list[Object]:
    """The means of ``bench --op``: ``what`` is ``fp8 over bf16`` or ``GEMM out over fp8, torch's``, ratios above 1: the
    first is faster. ``worst`` is the least of them, of the row with that layer and shape."""
    from fp8tune.bench.grouped import means

    return [
        {
            "row": "mean",
            "operation": rows[0].operation.name,
            "what": what,
            **_fields(mean, "geomean", "rows", "worst"),
            "worst_layer": mean.worst_row.problem.label or None,
            "worst_shape": dict(mean.worst_row.problem.shape),
        }
        for what, mean in means(rows).items()
    ]


def _finite(sqnr_db: Mapping[str, float] | None) -> object:
    """JSON has no infinity."""
    if sqnr_db is None:
        return None
    return {name: round(value, 2) if math.isfinite(value) else None for name, value in sqnr_db.items()}


# compare


# Workers and their queue


def worker_event(event: QueueEvent) -> Object:
    """``worker``: what became of one unit, or of the worker; what does not apply is null."""
    unit = event.unit
    return {
        **_fields(event, "event", "worker"),
        "unit": unit and unit.key,
        "sweep": unit and unit.sweep_key,
        "kernel": unit and unit.kernel,
        "shapes": unit and list(unit.shapes),
        "reason": redacted(event.reason),
        **_fields(event, "attempt", "seconds", "trials", "done", "failed", "running", "waiting"),
    }


def queue(queue: Queue) -> Object:
    """``queue``: every unit of work."""
    sweeps = {sweep.key: sweep for sweep in queue.sweeps}
    return {"units": [_queued_unit(of, sweeps[of.unit.sweep_key]) for of in queue.units]}


def _queued_unit(of: UnitStatus, sweep: QueuedSweep) -> Object:
    """What has become of it. ``worker`` has it now or had it last."""
    unit = of.unit
    return {
        "sweep": sweep.key,
        "command": redacted(sweep.command),
        "device": sweep.device,
        "unit": unit.key,
        "kernel": unit.kernel,
        "shapes": list(unit.shapes),
        "state": str(of.state),
        **_fields(of, "worker", "attempts", "since_s", "seconds", "lease_left_s", "reason"),
        **_fields(unit, "expected_s"),
    }
