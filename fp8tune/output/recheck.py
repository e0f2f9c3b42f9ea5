"""Document and screen of ``recheck``."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from fp8tune.options import RecheckOptions
from fp8tune.output.compare import size_text
from fp8tune.output.documents import Document, value
from fp8tune.output.show import Place, place
from fp8tune.output.tables import Column, Screen, number
from fp8tune.output.text import counted, db_option, duration, listed, mean, microseconds, ratio
from fp8tune.rechecking.run import Rechecked, State
from fp8tune.stats.means import group_by
from fp8tune.sweeping.planning import Plan


class RecheckedSize(Place):
    """The config in use of one size, with the versions installed here."""

    state: State = value("same code, still best, beaten, to sweep or not reached.")
    speedup: float | None = value("Time of the config in use over that of the best; null if it is not known.", "x")
    upgrade: float | None = value("Time of the config in use before the upgrade over its time now.", "x")
    config: dict[str, int] = value("Config in use.")
    best: dict[str, int] = value("Best known config.")
    config_us: float | None = value("Time of the config in use.", "us")
    best_us: float | None = value("Time of the best known config.", "us")
    processes: int = value("Fresh processes that timed both; 0 if one process did.")
    needs_sweep: bool = value("True if a sweep may find a better config.")


class RecheckedKernel(Document):
    """All rechecked sizes of one kernel."""

    kernel: str = value("Name of the kernel.")
    speedup: float | None = value("Geometric mean over the sizes.", "x")
    sizes: int = value("Rechecked sizes.")
    states: dict[State, int] = value("Number of sizes by state.")
    upgrade: float | None = value("Geometric mean of what the upgrade itself changed.", "x")


class RecheckReport(Document, printed_by="recheck"):
    """Configs in use after an upgrade."""

    document: Literal["recheck"] = value("Distinguishes documents.", default="recheck")
    gpu: str = value("Name of the GPU, or the arch if nothing was timed.")
    arch: str = value("Architecture of the GPU, such as sm_90.")
    before: list[str] = value("Versions of Triton that chose the configs.")
    triton: str = value("Version of Triton that is installed.")
    speedup: float | None = value("Geometric mean over all sizes.", "x")
    sweep_s: float = value("Estimated time of the sweeps that are needed.", "s")
    exit_code: int = value("Exit code of the command: 1 if a config is beaten.")
    kernels: list[RecheckedKernel] = value("One row per kernel, the largest speedup first.")
    rows: list[RecheckedSize] = value("One row per size.")


def make_report(plan: Plan, results: Sequence[Rechecked]) -> RecheckReport:
    """Return the results of a recheck as a document."""
    device, rows = plan.backend.device, [_size(plan, item) for item in results]
    kernels = [
        RecheckedKernel(
            kernel=kernel,
            speedup=mean(row.speedup for row in group),
            sizes=len(group),
            states=Counter(row.state for row in group),
            upgrade=mean(row.upgrade for row in group),
        )
        for kernel, group in group_by(rows, lambda row: row.kernel).items()
    ]
    lost = [item.target.size for item in results if item.needs_sweep]
    return RecheckReport(
        gpu=device.name or device.arch,
        arch=device.arch,
        before=sorted({item.target.old.device.triton for item in results if item.target.old}),
        triton=device.triton,
        speedup=mean(row.speedup for row in rows),
        sweep_s=sum(size.expected_s(quick=False) for size in lost),
        exit_code=int(any(row.state is State.BEATEN for row in rows)),
        kernels=sorted(kernels, key=lambda kernel: (-(kernel.speedup or 0.0), kernel.kernel)),
        rows=rows,
    )


def _size(plan: Plan, item: Rechecked) -> RecheckedSize:
    size, times_us, current = item.target.size, item.times_us, item.target.current
    return RecheckedSize.from_records(
        item,
        **place(plan.subject(size)),
        config=current,
        config_us=times_us.get(current),
        best_us=times_us.get(item.best),
        processes=item.new.choice.processes if item.is_confirmed and item.new else 0,
    )


def report(document: RecheckReport, options: RecheckOptions) -> Screen:
    """Return the screen: one row per kernel, and the commands that come next."""
    columns = [
        Column("kernel", lambda row: row.kernel, cut="start"),
        number("speedup", _speedup),
        number("sizes", lambda row: f"{row.sizes:,}"),
        *(number(str(state), _count_of(state)) for state in State if state is not State.NOT_REACHED),
        number("upgrade alone", lambda row: ratio(row.upgrade)),
    ]
    return Screen([_title(document)], columns, _next_lines(document, options), document.kernels)


def beaten(document: RecheckReport) -> Screen:
    """Return the sizes whose config is beaten, with both configs: what a pull request changes."""
    rows = sorted((row for row in document.rows if row.state is State.BEATEN), key=lambda row: -(row.speedup or 0.0))
    columns = [
        Column("kernel", lambda row: row.kernel),
        Column("size", lambda row: size_text(row)),
        number("speedup", lambda row: ratio(row.speedup)),
        number("us", lambda row: f"{microseconds(row.config_us)} -> {microseconds(row.best_us)}"),
        Column("config", lambda row: _change_of(row)),
    ]
    count = f"{counted(len(rows), 'config')} to change, each proven slower than another in fresh processes:"
    return Screen([count] if rows else [], columns if rows else [], [], rows)


def _change_of(row: RecheckedSize) -> str:
    """Return the axes that differ: ``num_warps=4 -> 8``."""
    names = [name for name in row.config if row.config[name] != row.best.get(name)]
    return ", ".join(f"{name}={row.config[name]} -> {row.best.get(name, '?')}" for name in names)


def _count_of(state: State) -> Callable[[RecheckedKernel], str]:
    return lambda row: f"{row.states.get(state, 0):,}"


def _speedup(row: RecheckedKernel) -> str:
    is_open = row.states.get(State.TO_SWEEP, 0) + row.states.get(State.NOT_REACHED, 0)
    beaten = row.states.get(State.BEATEN, 0)
    return "-" if is_open and not beaten else ratio(row.speedup, not beaten)


def _title(document: RecheckReport) -> str:
    before, now = (listed(map(_short, versions)) for versions in (document.before or [""], [document.triton]))
    versions = f"Triton {before} -> {now}" if before and now else "no Triton"
    states = Counter(row.state for row in document.rows)
    if states[State.NOT_REACHED] == len(document.rows) - states[State.SAME_CODE] > 0:  # nothing was timed
        same = f"{states[State.SAME_CODE]:,} of {counted(len(document.rows), 'config')}"
        return f"{document.gpu} ({versions}): {same} proven by equal machine code, the others not timed"
    beaten = states[State.BEATEN]
    gain = f"{document.speedup:.2f}x to gain" if beaten and document.speedup else "nothing to gain"
    verb = "is" if beaten == 1 else "are"
    return f"{gain} on {document.gpu} ({versions}): {beaten:,} of {counted(len(document.rows), 'config')} {verb} beaten"


def _short(version: str) -> str:
    return version.removesuffix(".0") if version.count(".") > 1 else version


def _next_lines(document: RecheckReport, options: RecheckOptions) -> list[str]:
    counts = Counter(row.state for row in document.rows)
    quick = sum(row.state is State.STILL_BEST and not row.processes for row in document.rows)
    to_sweep = sum(row.needs_sweep for row in document.rows)
    words = [shlex.quote(options.table)] if options.table else []
    pairs = {"--arch": [options.arch], "--kernel": options.kernel, "--recording": [options.recording]}
    words += [f"{name} {shlex.quote(text)}" for name, texts in pairs.items() for text in texts if text]
    command = " ".join(["fp8tune recheck", *words]) + db_option(options.db)
    lines = []
    if missing := counts[State.NOT_REACHED]:
        fix = f"run {command} again" if options.budget_s is not None else f"run {command} on that GPU"
        lines.append(f"{counted(missing, 'size')} not timed: {fix}")
    if to_sweep:
        minutes = max(1, round(1.5 * document.sweep_s / 60))
        verb = "needs" if to_sweep == 1 else "need"
        time = duration(document.sweep_s)
        lines.append(f"{counted(to_sweep, 'size')} {verb} a sweep, about {time}: {command} --budget {minutes}m")
    if quick:
        lines.append(f"{counted(quick, 'size')} still best in one process: --budget TIME confirms them in fresh ones")
    if counts[State.BEATEN]:
        lines.append(f"then: fp8tune export --arch {document.arch}{db_option(options.db)}")
    return lines
