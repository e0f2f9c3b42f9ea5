"""``fp8tune tune``."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fp8tune.cli.adapter import command
from fp8tune.cli.record import check_output, descriptor, nothing_recorded
from fp8tune.errors import UsageError
from fp8tune.options import SweepOptions, TuneOptions
from fp8tune.redaction import command_line, redacted

if TYPE_CHECKING:
    from fp8tune.records import Pick
    from fp8tune.replay.recording import Recording
    from fp8tune.store.results import Tally
    from fp8tune.tables.picks import KernelPicks
    from fp8tune.tuning.runs import Run

RECORDING = "run.json"
DIFF = "tune.diff"
WITHIN = 0.02
"""Slowdown that the diff allows for fewer configs, as ``fp8tune export`` does."""

EPILOG = """
$ fp8tune tune -- python train.py
$ fp8tune tune --budget 1h --apply -- torchrun --nproc-per-node 8 train.py
"""


@command(TuneOptions, usage="-- COMMAND...", epilog=EPILOG, allow_interspersed_args=False)
def tune(options: TuneOptions) -> None:
    """Record a program, tune its kernels, and offer the diff.

    Runs the program once, tunes what takes the most GPU time, runs it again with the picks, prints what that changed,
    and asks before it changes a file. Without a GPU it only checks outputs.
    """
    from fp8tune.measure.backends.choice import backend_for
    from fp8tune.output import checks
    from fp8tune.output import tune as screens
    from fp8tune.output.tables import notice
    from fp8tune.records import Kind
    from fp8tune.replay.recording import text_of
    from fp8tune.store import location
    from fp8tune.tuning import runs, work

    if not options.command:
        raise UsageError("the program to tune is missing: fp8tune tune -- python train.py")
    check_output(RECORDING)
    backend, notices = backend_for(None, options.timer)
    db = location.to_write(options.db)
    if backend.kind is not Kind.MEASURED:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if backend.kind is Kind.INTERPRETER:
        notice(
            "No GPU found: checking outputs on small sizes with Triton's interpreter (it sets TRITON_INTERPRET=1); "
            "nothing is timed."
        )
    notice(*notices)
    first = runs.run(options.command, options.kernel, descriptor())
    if first.ended.recording is None or not first.ended.recording.kernels or first.ended.exit_code:
        raise UsageError(f"nothing to tune: {nothing_recorded(first.ended, options.command)}")
    recording = first.ended.recording
    Path(RECORDING).write_text(text_of(recording), encoding="utf-8")
    weights, skipped = work.weights(recording), work.skipped(recording)
    kernels = [kernel for kernel in recording.kernels if kernel.name in weights]
    if not kernels:
        name, reason = next(iter(skipped.items()))
        raise UsageError(f"no kernel of the program can be tuned: {name} {reason}")
    notice(
        screens.recorded_line(redacted(shlex.join(options.command)), len(kernels), first.share_of(kernels), RECORDING)
    )
    tallies, picks = _sweep(options, recording, weights, db)
    if backend.kind is Kind.INTERPRETER:
        checks.checked_kernels(checks.make_check_list(tallies)).print()
        notice(*checks.failure_lines(tallies))
        notice("To tune, run the same command on a machine with a GPU.")
        raise typer.Exit(0 if all(tally.has_right for tally in tallies) else 1)
    exported = _exported(db, backend.device.arch, weights)
    second = _second_run(options, first, exported)
    _print_result(recording, picks, skipped, first, second, is_simulated=backend.kind is Kind.SIMULATED)
    if second is not None and second.ended.exit_code:
        raise UsageError(f"the program failed with exit code {second.ended.exit_code} with the picks: nothing changed")
    _offer(options, exported, db)


def _sweep(
    options: TuneOptions, recording: Recording, weights: Mapping[str, float], db: str
) -> tuple[list[Tally], dict[str, list[Pick]]]:
    """Sweep the kernels within the budget, first the launches that take the most GPU time."""
    from fp8tune.output.progress import SweepProgress
    from fp8tune.output.tables import notice
    from fp8tune.store.results import Store
    from fp8tune.sweeping import picks, planning, session
    from fp8tune.tuning import work

    ends, progress = time.monotonic() + options.budget_s, SweepProgress({})
    launches = {kernel.name: kernel.launches for kernel in recording.kernels}
    plans = {}
    for kernel in weights:
        sweep = SweepOptions(
            kernel=(kernel,), recording=RECORDING, tolerance=options.tolerance, timer=options.timer, db=options.db
        )
        plan = planning.expanded(planning.planned(sweep, command_line(map(shlex.quote, sys.argv[1:]))))
        plans[kernel] = (plan, work.shares(plan, launches[kernel]))
    turns = [(turn, kernel, plan) for kernel, (_, parts) in plans.items() for turn, plan in enumerate(parts)]
    turns.sort(key=lambda item: item[0])
    unfinished = 0
    with Store.open(db, create=True) as store:
        with progress:
            for index, (turn, kernel, plan) in enumerate(turns):
                ahead = sum(weights[name] for other, name, _ in turns[index:] if other == turn)
                budget_s = (ends - time.monotonic()) * weights[kernel] / ahead
                if budget_s <= 0:
                    unfinished += len(plan.problems)
                    continue
                plan = replace(plan, options=replace(plan.options, budget_s=budget_s))
                for event in session.run(store, plan):
                    progress.show(event)
        if unfinished:
            notice(f"the budget left out {unfinished} launches: run the same command to resume, or give --budget 1h")
        tallies = [tally for plan, _ in plans.values() for tally in session.tallies(store, plan)]
        studies = {kernel: session.studies(store, plan) for kernel, (plan, _) in plans.items()}
    return tallies, {kernel: picks.of(found) for kernel, found in studies.items()}


def _exported(db: str, arch: str, kernels: Mapping[str, float]) -> list[KernelPicks]:
    """Return the confirmed picks of each kernel that has some."""
    from fp8tune.exporting import read_for_format
    from fp8tune.output.tables import warning
    from fp8tune.store.results import Store

    exported = []
    with Store.open(db) as store:
        for kernel in kernels:
            try:
                exported += read_for_format(store, arch, [kernel], allow_quick=False)[:1]
            except UsageError as error:
                warning([str(error)])
    return exported


def _second_run(options: TuneOptions, first: Run, exported: Sequence[KernelPicks]) -> Run | None:
    """Run the program with its kernels pinned to the picks; None if there is nothing to pin."""
    from fp8tune.output.tables import notice
    from fp8tune.tables.formats import Options, python_file
    from fp8tune.tuning import runs

    if not exported:
        return None
    notice("Running the program again with the picks.")
    with tempfile.TemporaryDirectory(prefix="fp8tune-picks-") as folder:
        for number, picks in enumerate(exported):
            of_any_device = replace(picks, device=replace(picks.device, name=""))
            (table,) = python_file.write([of_any_device], Options())
            Path(folder, f"{number}.py").write_text(table.text, encoding="utf-8")
        return runs.run(options.command, options.kernel, descriptor(), first=first, tables=Path(folder))


def _print_result(
    recording: Recording,
    picks: Mapping[str, Sequence[Pick]],
    skipped: Mapping[str, str],
    first: Run,
    second: Run | None,
    *,
    is_simulated: bool,
) -> None:
    from fp8tune.output import tune as screens
    from fp8tune.output.show import ListedPick
    from fp8tune.records import RECORDED
    from fp8tune.tuning import runs

    change = runs.Change(reason="no pick is confirmed") if second is None else runs.change(first, second)
    after_s = {}
    if second is not None and second.ended.recording is not None:
        after_s = {kernel.name: kernel.tuning_s for kernel in second.ended.recording.kernels}
    rows = []
    for kernel in recording.kernels:
        if not (listed := picks.get(kernel.name)):
            continue
        counts = {RECORDED + launch.id: launch.count for launch in kernel.launches}
        tuning_s = after_s.get(kernel.name)
        rows.append(
            screens.TunedKernel(
                kernel.name,
                [ListedPick.of(pick) for pick in listed],
                [counts.get(pick.problem.input_layout, 1) for pick in listed],
                change.kernels.get(runs.function_of(kernel)),
                None if tuning_s is None or is_simulated else tuning_s - kernel.tuning_s,
            )
        )
    headline = screens.headline(change.gpu, change.startup_s, change.reason)
    screens.result(rows, skipped, headline, by_tuning=any(kernel.tuning_s for kernel in recording.kernels)).print()


def _offer(options: TuneOptions, exported: Sequence[KernelPicks], db: str) -> None:
    """Apply, write or offer the diff."""
    from fp8tune.output.tables import console, notice, print_lines, warning
    from fp8tune.output.text import counted, db_option, listed
    from fp8tune.tuning import changes

    autotuned = [picks for picks in exported if picks.recorded is not None and picks.recorded.is_autotuned]
    changed, notes = changes.changed_files(autotuned, WITHIN)
    warning(notes)
    if not changed:
        notice("No diff: no list of configs gets shorter." if autotuned else "No diff: nothing is confirmed.")
        return
    before, after = (sum(count[side] for file in changed for count in file.counts) for side in (0, 1))
    names = listed([str(file.name) for file in changed])
    line = f"The diff keeps {after} of {counted(before, 'config')} of {names}, all within 2 % of the best."
    print_lines(console(), [line])
    text, later = "".join(file.diff for file in changed), f"Later: fp8tune export --for diff{db_option(options.db)}"
    if options.output is not None:
        Path(options.output).write_text(text, encoding="utf-8")
        notice(f"{options.output}: written; next: git apply {shlex.quote(options.output)}")
    answer = "y" if options.apply else "n" if options.output is not None or not sys.stdin.isatty() else ""
    while not answer:
        asked = typer.prompt("Apply it? [y]es, [v]iew, [s]ave as tune.diff, [n]o", default="n", show_default=False)
        answer = asked.strip().lower()[:1]
        if answer == "v":
            print(text, end="")
            answer = ""
    if answer == "y":
        changes.apply(changed)
        notice(*(f"{file.path}: changed" for file in changed))
    elif answer == "s":
        Path(DIFF).write_text(text, encoding="utf-8")
        notice(f"{DIFF}: written; next: git apply {DIFF}")
    elif options.output is None:
        notice(f"{later} (or --for python, for a table)")
