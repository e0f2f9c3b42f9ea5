"""``fp8tune.sweep``, ``recheck`` and ``compare``: work that takes a GPU, a simulated one, or recorded results."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fp8tune.api import frames
from fp8tune.api.results import Names, Results, open, several
from fp8tune.comparing import live, recorded, sides
from fp8tune.comparing.verdicts import Comparison as Judged
from fp8tune.errors import UsageError
from fp8tune.measure.backends import backend_for
from fp8tune.options import CompareOptions, RecheckOptions, SweepOptions
from fp8tune.output import compare as documents
from fp8tune.output import recheck as recheck_documents
from fp8tune.output.checks import UNCHECKED
from fp8tune.output.progress import Display, SweepProgress
from fp8tune.output.show import ListedPick
from fp8tune.output.text import counted
from fp8tune.plan import shapes
from fp8tune.rechecking import run as rechecking
from fp8tune.rechecking import targets
from fp8tune.records import Kind
from fp8tune.redaction import redacted
from fp8tune.store import layers, location
from fp8tune.store.results import Store
from fp8tune.studies import known_programs
from fp8tune.sweeping import children, picks, planning, session
from fp8tune.sweeping.events import Event, Finished

if TYPE_CHECKING:
    from pandas import DataFrame

logger = logging.getLogger("fp8tune")


@dataclass(frozen=True)
class SweepResult:
    """Result of a sweep."""

    db: str
    """Database that holds its results."""
    picks: DataFrame
    """Best config of each of its sizes, with the columns of :meth:`Results.picks`; empty if nothing was timed."""
    is_right: bool | None
    """True if every size has a right config: the command's exit code 0; None if no output was checked."""
    left_out: int
    """Blocks that the budget left out."""
    notices: tuple[str, ...]

    @property
    def results(self) -> Results:
        """All results of its database."""
        return open(self.db)


def sweep(
    kernel: Names = None,
    shapes: Names = "llama4",
    *,
    recording: str | Path | None = None,
    quick: bool = False,
    budget_s: float | None = None,
    db: str | Path | None = None,
    on_event: Callable[[Event], object] | None = None,
    options: SweepOptions | None = None,
) -> SweepResult:
    """Check and time every config; resume what is stored. Shows progress unless on_event is given.

    Every result is stored as it comes, and the same call resumes. What ``on_event`` raises ends the sweep. The sweep
    runs here and in processes that it starts: a script needs ``if __name__ == "__main__":`` around the call. Without a
    GPU it sets ``TRITON_INTERPRET=1`` here and times nothing.

    Args:
        kernel: Kernels, as the command takes them; None for all of fp8tune, or all of the recording.
        shapes: Shape sets, ``SET[,NAME=VALUE...]``.
        recording: File of ``fp8tune record``.
        quick: Coarse pass only.
        budget_s: Time limit.
        db: Database to write; None for ``$FP8TUNE_DB``, else ``./fp8tune.db``.
        on_event: Receives each event of :mod:`fp8tune.sweeping.events`.
        options: Everything rarer, as the command has it; the other arguments replace its fields.

    Raises:
        Fp8tuneError: A name is unknown, or this machine or the database cannot do it. A wrong config raises nothing.
    """
    shapes = None if shapes == "llama4" else shapes  # else those of the recording would be left out
    arguments = _arguments(kernel=kernel, shapes=shapes, recording=recording, quick=quick, budget_s=budget_s, db=db)
    chosen = replace(options or SweepOptions(), **arguments)
    if chosen.on is not None:
        raise UsageError("a sweep from Python runs here: for a Ray cluster use fp8tune sweep --on ray")
    text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    plan = planning.planned(chosen, f"fp8tune.sweep({redacted(text)})")
    path = location.to_write(chosen.db)
    plan = planning.expanded(plan)
    finished = Finished(0.0)
    with Store.open(path, create=True) as store, contextlib.ExitStack() as stack:
        if on_event is None:
            on_event = stack.enter_context(SweepProgress.of_plan(plan)).show
        events = stack.enter_context(contextlib.closing(children.run(store, plan)))  # type: ignore[type-var]
        for event in events:
            if isinstance(event, Finished):
                finished = event
            on_event(event)
        tallies, studies = session.tallies(store, plan), session.studies(store, plan)
    return SweepResult(
        db=path,
        picks=frames.table(ListedPick, map(ListedPick.from_pick, picks.decided(studies))),
        is_right=None if plan.backend.kind in UNCHECKED else all(tally.has_right for tally in tallies),
        left_out=finished.left_out,
        notices=tuple(plan.notices),
    )


@dataclass(frozen=True)
class Recheck:
    """Result of a recheck."""

    rows: DataFrame
    """One row per size: state, speedup, what the upgrade itself changed, the config in use, and the best."""
    exit_code: int
    """Exit code of the command: 1 if a config is beaten."""
    speedup: float | None
    """Geometric mean of what the best known configs gain."""
    sweep_s: float
    """Estimated seconds of the sweeps that are needed."""


def recheck(
    kernel: Names = None,
    *,
    arch: str | None = None,
    table: str | Path | None = None,
    recording: str | Path | None = None,
    budget_s: float | None = None,
    db: str | Path | None = None,
) -> Recheck:
    """Test whether tuned configs still hold with the versions installed here. `.rows` is a DataFrame.

    Results are kept in the database, and the same call resumes. As for :func:`sweep`, a script needs
    ``if __name__ == "__main__":`` around the call.

    Args:
        kernel: Kernels; None for all of the table.
        arch: The arch, if not this GPU's: then only machine code is compared.
        table: File that ``fp8tune export`` or ``export --for python`` wrote; None for the tables in use.
        recording: File of ``fp8tune record``, for kernels of your own.
        budget_s: Time limit. With one, sizes whose ranking moved are swept.
        db: Database to read and write; None for the own results over those that come with fp8tune.

    Raises:
        Fp8tuneError: A name is unknown, there is nothing to recheck, or this machine cannot do it.
    """
    arguments = _arguments(kernel=kernel, arch=arch, table=table, recording=recording, budget_s=budget_s, db=db)
    document = rechecked(RecheckOptions(**arguments), "fp8tune.recheck()", logger.warning)
    rows = frames.table(recheck_documents.RecheckedSize, document.rows)
    return Recheck(rows, document.exit_code, document.speedup, document.sweep_s)


def rechecked(options: RecheckOptions, command: str, notice: Callable[[str], None]) -> recheck_documents.RecheckReport:
    """Recheck as the options say; ``notice`` takes lines that are no part of the result."""
    begun, progress = time.monotonic(), SweepProgress(budget_s=options.budget_s)
    path = location.to_write(options.db)
    with layers.opened_databases(location.to_read(options.db, notice), notice) as reader:
        plan, chosen = targets.planned(options, reader, command)
        programs = reader.programs(arch=plan.backend.device.arch)
    for line in plan.notices:
        notice(line)
    with Store.open(path, create=True) as store, progress:

        def report(done: int, total: int) -> None:
            progress.update("comparing machine code", done / total, count=f"{done} of {counted(total, 'launch')}")

        work = rechecking.Recheck(store, plan, chosen, programs, report, begun=begun)
        for event in work.run():
            progress.show(event)
    return recheck_documents.make_report(plan, work.results)


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison."""

    rows: DataFrame
    """One row per size and GPU: verdict, speedup, interval, times and configs."""
    exit_code: int
    """Exit code of the command: 1 for REGRESSION or WRONG, 3 for OPEN."""
    speedup: float | None
    """Geometric mean over the sizes whose code changed; below 1 is slower."""


def compare(
    revisions: str,
    kernel: Names = None,
    shapes: Names = None,
    *,
    picks: Literal["own", "same", "retune"] = "own",
    outputs_only: bool = False,
    db: str | Path | None = None,
) -> Comparison:
    """Judge "A..B"; `.rows` has a speedup, an interval and a verdict per size, `.exit_code` the result."""
    arguments = {"shapes": shapes, "picks": picks, "outputs_only": outputs_only, "db": db}
    options = CompareOptions(**_arguments(revisions=revisions, kernel=kernel, **arguments))
    document = documents.make(compared(options, logger.info))
    return Comparison(frames.table(documents.ComparedSize, document.rows), document.exit_code, document.speedup)


def compared(options: CompareOptions, notice: Callable[[str], None]) -> Judged:
    """Compare on the GPU, the simulated clock or Triton's interpreter, or with ``db`` by recorded results."""
    if ".." not in options.revisions:
        got = f", got {options.revisions!r:.80}" if options.revisions else ""
        raise UsageError(f"compare needs two revisions{got}: write main..branch, or main..WORKTREE")
    selections = [*map(shapes.parse, options.shapes)]
    if options.db is not None:
        if options.outputs_only:
            raise UsageError("--outputs-only runs kernels, and --db only reads results: leave one out")
        with (
            sides.checked_out(options.revisions, options.kernel) as both,
            layers.opened_databases(location.to_read(options.db, notice), notice) as reader,
        ):
            studies = recorded.stored(reader, both)
            if selections:
                studies = recorded.selected(studies, both, selections)
            return recorded.compare(studies, both, known_programs(reader))
    backend, notices = backend_for(None, options.timer)
    if options.outputs_only and backend.kind is Kind.SIMULATED:
        raise UsageError("--outputs-only runs kernels, and a simulated clock runs none: leave out the timer")
    if backend.kind is Kind.INTERPRETER:
        notices = ("No GPU found: comparing outputs on small sizes with Triton's interpreter; nothing is timed",)
    with sides.checked_out(options.revisions, options.kernel) as both:
        for line in notices:
            notice(line)
        with Display() as display:

            def report(text: str, done: int, total: int) -> None:
                display.update(text, done / total if total else 0.0, count=f"{done} of {total}" if total else "")

            chosen, outputs_only = selections or [shapes.load("llama4")], options.outputs_only
            return live.compare(both, chosen, options.picks, backend, report, outputs_only=outputs_only)


def _arguments(**arguments: Any) -> dict[str, Any]:
    """Return what was given, as the options dataclasses have it: paths as text, names as tuples."""
    converted = {
        name: several(value) if name in ("kernel", "shapes") else os.fspath(value) if isinstance(value, Path) else value
        for name, value in arguments.items()
    }
    return {name: value for name, value in converted.items() if not (value is None or value is False or value == ())}
