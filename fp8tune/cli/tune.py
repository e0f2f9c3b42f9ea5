"""``fp8tune tune``."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer

from fp8tune.cli.program import end_note, this_command
from fp8tune.cli.record import check_output, descriptor, nothing_recorded
from fp8tune.errors import UsageError
from fp8tune.exporting import read_for_format
from fp8tune.measure.backends import backend_for
from fp8tune.measure.gpus import choose_gpus
from fp8tune.options import SweepOptions, TuneOptions
from fp8tune.output import checks
from fp8tune.output import tune as screens
from fp8tune.output.progress import SweepProgress
from fp8tune.output.tables import notice, print_lines, warning
from fp8tune.output.text import command, counted, duration, listed
from fp8tune.records import RECORDED, Kind, Pick, Status
from fp8tune.redaction import redacted
from fp8tune.replay.recording import Recording, text_of
from fp8tune.stats.means import group_by
from fp8tune.store import database, location
from fp8tune.store.results import Store, Tally
from fp8tune.sweeping import picks as deciding
from fp8tune.sweeping import planning, session
from fp8tune.tables.formats import Options, python_file
from fp8tune.tables.picks import KernelPicks
from fp8tune.tuning import changes, runs, selection, sweeps

RECORDING = "run.json"
DIFF = "tune.diff"
CONFIRMED = ("proven", "open")
WITHIN = 0.02
"""Slowdown that the diff allows for fewer configs, as ``fp8tune export`` does."""


def tune(options: TuneOptions) -> int:
    """Record, sweep, run again and offer the diff. Returns the program's exit code if it failed.

    Without a GPU it only checks, and exit code 1 says that a size has no right config.
    """
    if not options.command:
        raise UsageError("the program to tune is missing: fp8tune tune -- python train.py")
    check_output(RECORDING)
    choose_gpus(options.gpus, options.timer)  # before the program runs for minutes in vain
    backend, notices = backend_for(None, options.timer)
    db, device = location.to_write(options.db), backend.device
    if backend.kind is not Kind.MEASURED:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if backend.kind is Kind.INTERPRETER:
        checking = "checking outputs on small sizes with Triton's interpreter (it sets TRITON_INTERPRET=1)"
        notice(f"No GPU found: {checking}; nothing is timed.")
    notice(*notices)
    first = runs.run(options.command, options.kernel, descriptor())
    recording = first.ended.recording
    if first.ended.exit_code:
        return _failed(first, "nothing to tune")
    if recording is None or not recording.kernels:
        raise UsageError(f"nothing to tune: {nothing_recorded(first.ended, options.command, options.kernel)}")
    Path(RECORDING).write_text(text_of(recording), encoding="utf-8")
    kernels = selection.tunable(recording)
    skipped = {kernel.name: reason for kernel in recording.kernels if (reason := selection.why_not(kernel))}
    if not kernels:
        name, reason = next(iter(skipped.items()))
        raise UsageError(f"no kernel of the program can be tuned: {name}: {reason}")
    program = redacted(shlex.join(options.command))
    notice(screens.recorded_line(program, len(kernels), first.share_of(kernels), RECORDING))
    if backend.times:
        limit = duration(options.budget_s).removesuffix(" 0 s")
        notice(f"Tuning on {device.name or device.arch} for at most {limit}. Ctrl-C stops; results are kept.")
    plan, tallies, picks = _sweep(options, recording, kernels, db)
    if backend.kind is Kind.INTERPRETER:
        _print_checks(options, tallies)
        return int(not all(tally.has_right for tally in tallies))
    skipped |= selection.disputed(plan, tallies)
    picks = [pick for pick in picks if pick.problem.kernel not in skipped]
    exported = _exported(db, device.arch, picks)
    second, change = None, runs.Change(reason="no pick is confirmed")
    if exported:
        second = _second_run(options, first, exported)
        change = runs.change(first, second)
    rows = _tuned_kernels(recording, picks, change)
    by_tuning = any(kernel.tuning_s for kernel in recording.kernels)
    screens.result(rows, skipped, change, by_tuning=by_tuning).print()
    if second is not None:
        for kernel in {kernel.kernel for kernel in exported} - change.pinned:
            notice(f"{kernel} ran without its picks: a copy of it was launched, as torch.compile does")
        if second.ended.exit_code:
            return _failed(second, "no file is changed: that was the run with the picks")
    offer(options, exported)
    return 0


def _failed(run: runs.Run, consequence: str) -> int:
    """Report a program that failed or that Ctrl-C stopped; return its exit code."""
    if run.ended.exit_code == 130:
        raise KeyboardInterrupt
    notice(f"fp8tune: {consequence}: the program failed with exit code {run.ended.exit_code}, see above")
    return run.ended.exit_code


def _print_checks(options: TuneOptions, tallies: Sequence[Tally]) -> None:
    """Print the kernels that were checked, with the command that shows wrong outputs."""
    checks.checked_kernels(checks.make_check_list(tallies)).print()
    notice(*checks.agreement_lines(tallies), *checks.failure_lines(tallies))
    for kernel, group in group_by(tallies, lambda tally: tally.subject.problem.kernel).items():
        if wrong := sum(tally.counts[Status.WRONG] for tally in group):
            step = command("show", kernel, "--failed", db=options.db)
            notice(f"{counted(wrong, 'config')} of {kernel} gave a wrong output: {step}")
    notice("To tune, run the same command on a machine with a GPU.")


def _sweep(
    options: TuneOptions, recording: Recording, kernels: Sequence[str], db: str
) -> tuple[planning.Plan, list[Tally], list[Pick]]:
    """Sweep the kernels within the budget, first the launches that take the most GPU time."""
    sweep = SweepOptions(
        kernel=tuple(kernels),
        recording=RECORDING,
        tolerance=options.tolerance,
        gpus=options.gpus,
        timer=options.timer,
        db=options.db,
        budget_s=options.budget_s,
        quick=True,
    )
    plan = planning.expanded(planning.planned(sweep, this_command()))
    plan, first = selection.ordered(plan, recording)
    progress = SweepProgress.of_plan(plan)
    with end_note(lambda: progress.stored_note(database.label(db))), Store.open(db, create=True) as store, progress:
        with contextlib.closing(sweeps.run(store, plan, first, options.budget_s)) as running:  # type: ignore[type-var]
            for event in running:
                progress.show(event)
        left_out = len(plan.problems) - len(sweeps.timed_sizes(store, plan)) if plan.backend.times else 0
        if left_out:
            notice(f"The budget left out {counted(left_out, 'size')}: --budget 1h has time for more.")
        return plan, session.tallies(store, plan), deciding.decided(session.studies(store, plan))


def _exported(db: str, arch: str, picks: Sequence[Pick]) -> list[KernelPicks]:
    """Return the confirmed picks of each kernel that has some."""
    exported = []
    with Store.open(db) as store:
        for kernel in dict.fromkeys(pick.problem.kernel for pick in picks if pick.verdict in CONFIRMED):
            try:
                exported += read_for_format(store, arch, [kernel], allow_quick=False)[:1]
            except UsageError as error:
                warning([str(error)])
    return exported


def _second_run(options: TuneOptions, first: runs.Run, exported: Sequence[KernelPicks]) -> runs.Run:
    """Run the program with its kernels pinned to the picks."""
    notice("Running the program again with the picks.")
    with tempfile.TemporaryDirectory(prefix="fp8tune-picks-") as folder:
        for number, picks in enumerate(exported):
            of_any_device = replace(picks, device=replace(picks.device, name=""))
            (table,) = python_file.write([of_any_device], Options())
            Path(folder, f"{number}.py").write_text(table.text, encoding="utf-8")
        return runs.run(options.command, options.kernel, descriptor(), first=first, tables=Path(folder))


def _tuned_kernels(recording: Recording, picks: Sequence[Pick], change: runs.Change) -> list[screens.TunedKernel]:
    """Return what the picks of each kernel are worth by themselves, and what they changed in the program."""
    rows, by_kernel = [], group_by(picks, lambda pick: pick.problem.kernel)
    for kernel in recording.kernels:
        if chosen := by_kernel.get(kernel.name):
            counts = {RECORDED + launch.id: launch.count for launch in kernel.launches}
            launches = [counts.get(pick.problem.input_layout, 1) for pick in chosen]
            function = runs.function_of(kernel.name)
            gpu_change = None if change.kernels is None else change.kernels.get(function, 0.0)
            rows.append(screens.TunedKernel(chosen, launches, gpu_change, change.tuning_s.get(function)))
    return rows


def offer(options: TuneOptions, exported: Sequence[KernelPicks]) -> None:
    """Apply, write or offer the diff."""
    autotuned = [picks for picks in exported if picks.recorded is not None and picks.recorded.is_autotuned]
    changed, notes = changes.changed_files(autotuned, WITHIN)
    differences = changes.differences(autotuned)
    warning(dict.fromkeys(note for note in (*notes, *differences) if not (options.apply and note in differences)))
    if not changed:
        if options.apply:
            changes.apply(changed, autotuned)
        notice("No diff: no list of configs gets shorter." if autotuned else "No diff: nothing is confirmed.")
        return
    before, after = (sum(count[side] for file in changed for count in file.counts) for side in (0, 1))
    names = listed([str(file.name) for file in changed])
    print_lines([f"The diff keeps {after} of {counted(before, 'config')} of {names}, all within 2 % of the best."])
    text = "".join(file.diff for file in changed)
    answer = "y" if options.apply else "n" if options.output is not None or not sys.stdin.isatty() else ""
    while answer in ("", "v"):
        reply = typer.prompt("Apply it? [y]es, [v]iew, [s]ave as tune.diff, [n]o", default="n", show_default=False)
        answer = reply.strip().lower()[:1]
        if answer == "v":
            print(text, end="")
    for file in filter(None, (options.output, DIFF if answer == "s" else None)):
        Path(file).write_text(text, encoding="utf-8")
        notice(f"{file}: written; next: git apply {shlex.quote(file)}")
    if answer == "y":
        changes.apply(changed, autotuned)
        notice(*(f"{file.path}: changed" for file in changed))
    elif answer != "s" and options.output is None:
        device = autotuned[0].device
        arch = () if device.name and device.arch != "simulated" else ("--arch", device.arch)
        for picks in autotuned:
            step = command("export", "--for", "diff", "--kernel", picks.kernel, *arch, db=options.db)
            notice(f"Later: {step} (or --for python, for a table)")
