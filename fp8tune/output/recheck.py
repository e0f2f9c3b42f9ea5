"""Document and screens of ``recheck``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from fp8tune.options import RecheckOptions
from fp8tune.output.compare import size_text
from fp8tune.output.documents import Document, Gpu, value
from fp8tune.output.show import Place
from fp8tune.output.tables import Column, Screen, number
from fp8tune.output.text import command, counted, duration, listed, mean, microseconds, ratio
from fp8tune.rechecking.run import Rechecked, State
from fp8tune.stats.means import group_by
from fp8tune.sweeping.planning import Plan


class RecheckedSize(Place):
    """The config in use of one size, with the versions installed here."""

    state: State = value("same code, still best, beaten, to sweep or not reached.")
    speedup: float | None = value("Time of the config in use over that of the best; null if it is not known.", "x")
    upgrade: float | None = value("Time of the config in use before the upgrade over its time now.", "x")
    config: dict[str, int] = value("Config in use.", source="target.current")
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
    gpu: Gpu = value("Name of the GPU, or the arch if nothing was timed.")
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
    rows = [
        RecheckedSize.from_records(
            plan.subject(item.target.size),
            item,
            config_us=item.times_us.get(item.target.current),
            best_us=item.times_us.get(item.best),
            processes=item.new.choice.processes if item.is_confirmed and item.new else 0,
        )
        for item in results
    ]
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
    return RecheckReport.from_records(
        plan.backend.device,
        gpu=plan.backend.device,
        before=sorted({item.target.old.device.triton for item in results if item.target.old}),
        speedup=mean(row.speedup for row in rows),
        sweep_s=sum(item.target.size.expected_s(quick=False) for item in results if item.needs_sweep),
        exit_code=int(any(row.state is State.BEATEN for row in rows)),
        kernels=sorted(kernels, key=lambda kernel: (-(kernel.speedup or 0.0), kernel.kernel)),
        rows=rows,
    )


def report(document: RecheckReport, options: RecheckOptions) -> Screen:
    """Return the screen: one row per kernel, and the commands that come next."""

    def speedup(row: RecheckedKernel) -> str:
        is_open, beaten = {State.TO_SWEEP, State.NOT_REACHED} & {*row.states}, row.states.get(State.BEATEN, 0)
        return "-" if is_open and not beaten else ratio(row.speedup, not beaten)

    def count(state: State) -> Callable[[RecheckedKernel], str]:
        return lambda row: f"{row.states.get(state, 0):,}"

    columns = [
        Column("kernel", lambda row: row.kernel, loses="start"),
        number("speedup", speedup),
        number("sizes", lambda row: f"{row.sizes:,}"),
        *(number(str(state), count(state)) for state in State if state is not State.NOT_REACHED),
        number("upgrade alone", lambda row: ratio(row.upgrade)),
    ]
    return Screen([_title(document)], columns, [*_next_lines(document, options)], document.kernels)


def beaten(document: RecheckReport) -> Screen:
    """Return the sizes whose config is beaten, with both configs: what a pull request changes."""
    rows = sorted((row for row in document.rows if row.state is State.BEATEN), key=lambda row: -(row.speedup or 0.0))

    def changed_axes(row: RecheckedSize) -> str:
        names = [name for name in row.config if row.config[name] != row.best.get(name)]
        return ", ".join(f"{name}={row.config[name]} -> {row.best.get(name, '?')}" for name in names)

    columns = [
        Column("kernel", lambda row: row.kernel),
        Column("size", size_text),
        number("speedup", lambda row: ratio(row.speedup)),
        number("us", lambda row: f"{microseconds(row.config_us)} -> {microseconds(row.best_us)}"),
        Column("config", changed_axes),
    ]
    count = f"{counted(len(rows), 'config')} to change: each fails, or another is proven faster in fresh processes"
    return Screen([count], columns, [], rows)


def _title(document: RecheckReport) -> str:
    before, now = (
        listed(version.removesuffix(".0") if version.count(".") > 1 else version for version in versions)
        for versions in (document.before or [""], [document.triton])
    )
    versions = f"Triton {before} -> {now}" if before and now else f"Triton {now}" if now else "no Triton"
    states, total = Counter(row.state for row in document.rows), counted(len(document.rows), "config")
    same, count = states[State.SAME_CODE], states[State.BEATEN]
    if states[State.NOT_REACHED] == len(document.rows) - same > 0:  # nothing was timed
        proven = f"{same:,} of {total} proven by equal machine code"
        return f"{document.gpu} ({versions}): {proven}, the others not timed"
    gain = f"{document.speedup:.2f}x to gain" if count and document.speedup else "nothing to gain"
    return f"{gain} on {document.gpu} ({versions}): {count:,} of {total} {'is' if count == 1 else 'are'} beaten"


def _next_lines(document: RecheckReport, options: RecheckOptions) -> Iterator[str]:
    states = Counter(row.state for row in document.rows)
    named = {"--arch": [options.arch], "--kernel": options.kernel, "--recording": [options.recording]}
    words = [word for name, texts in named.items() for text in texts if text for word in (name, text)]
    same = command("recheck", options.table, *words, db=options.db)
    if missing := states[State.NOT_REACHED]:
        fix = f"run {same} again" if options.budget_s is not None else f"run {same} on that GPU"
        yield f"{counted(missing, 'size')} not timed: {fix}"
    if to_sweep := sum(row.needs_sweep for row in document.rows):
        needs = f"{counted(to_sweep, 'size')} {'needs' if to_sweep == 1 else 'need'} a sweep"
        minutes = max(1, round(1.5 * document.sweep_s / 60))
        yield f"{needs}, about {duration(document.sweep_s)}: {same} --budget {minutes}m"
    if quick := sum(row.state is State.STILL_BEST and not row.processes for row in document.rows):
        yield f"{counted(quick, 'size')} still best in one process: --budget TIME confirms them in fresh ones"
    if states[State.BEATEN]:
        file = options.table or ("FILE" if document.arch == "simulated" else "")  # its picks are not for lookups
        output = ("-o", file) if file else ()
        own = [word for row in document.kernels for word in ("--kernel", row.kernel)]
        python = ("--for", "python", *own) if options.recording else ()
        yield f"then: {command('export', *python, '--arch', document.arch, *output, db=options.db)}"
