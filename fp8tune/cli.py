"""Parse, call one function, print. Heavy imports live inside the commands: ``--help`` takes a tenth of a second."""

from __future__ import annotations

import enum
import gc
import sys
from pathlib import Path
from typing import Annotated, Any, Optional, cast

import typer

from fp8tune import __version__
from fp8tune.errors import Fp8tuneError, UsageError
from fp8tune_kernels.catalog import KERNELS

app = typer.Typer(
    name="fp8tune",
    help="Sweep launch configs of FP8 mixture-of-experts Triton kernels, keep every result, export the best.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

DEFAULT_DATABASE = "results.db"

COMMAND_LINE_ERRORS: tuple[type[Exception], ...] = cast(Any, typer.BadParameter.__mro__[1:3])
"""UsageError and ClickException, of the click that this typer uses: newer ones bring their own."""

KernelOption = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads the annotation at run time
    typer.Option(
        "--kernel",
        help=f"One of {', '.join(KERNELS)}; or module:ATTRIBUTE or path.py:ATTRIBUTE of a spec elsewhere. Repeatable.",
        show_default="all",
    ),
]
DatabaseOption = Annotated[str, typer.Option("--db", help="Results database: a path or any SQLAlchemy URL.")]
ArchOption = Annotated[Optional[str], typer.Option("--arch", help="A GPU arch such as sm_90 or gfx942.")]  # noqa: UP045 - as above


class Format(enum.StrEnum):
    """What ``show`` prints."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


class BenchFormat(enum.StrEnum):
    """What ``bench`` and ``lint`` print."""

    TABLE = "table"
    JSON = "json"


class Operation(enum.StrEnum):
    """What ``bench`` times beside single kernels."""

    GROUPED_MM = "grouped-mm"


class OperationFormat(enum.StrEnum):
    """What ``bench`` prints."""

    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"


class CompareFormat(enum.StrEnum):
    """What ``compare`` prints."""

    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"
    HTML = "html"


class CompareConfigs(enum.StrEnum):
    """Which config ``compare`` launches on each side."""

    OWN = "own"
    SAME = "same"
    RETUNE = "retune"


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"fp8tune {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def sweep(
    kernel: KernelOption = None,
    shapes: Annotated[
        Optional[list[str]],  # noqa: UP045 - as above
        typer.Option("--shapes", help="A shape set in sweeps/ or a path.toml. Repeatable.", show_default="llama4"),
    ] = None,
    routing: Annotated[
        str, typer.Option(help="How rows spread over groups: balanced, jagged, zipf, one-giant, empty or ragged.")
    ] = "jagged",
    grid: Annotated[
        Optional[list[str]],  # noqa: UP045 - as above
        typer.Option("--grid", help="Narrow or widen an axis: num_warps=4,8. Repeatable."),
    ] = None,
    arch: Annotated[
        Optional[str],  # noqa: UP045 - as above
        typer.Option("--arch", help="Compile for an arch that is not here: static facts, no timings."),
    ] = None,
    static: Annotated[
        bool, typer.Option("--static", help="Compile only, also where --arch is this machine's.")
    ] = False,
    scale_mode: Annotated[
        Optional[str],  # noqa: UP045 - as above
        typer.Option("--scale-mode", help="power-of-two or exact.", show_default="the kernel's first"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seeds values and group layouts.")] = 0,
    timer: Annotated[
        Optional[str],  # noqa: UP045 - as above
        typer.Option("--timer", help="simulated:SEED runs on a fake GPU.", show_default="do_bench"),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what already has a row.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try configs again that failed before.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="The screen alone; without it finals in fresh processes.")
    ] = False,
    time_budget: Annotated[
        Optional[float],  # noqa: UP045 - as above
        typer.Option("--time-budget", help="Start no new problem after this many seconds; say what was left out."),
    ] = None,
    trial_timeout: Annotated[
        float, typer.Option("--trial-timeout", help="Seconds after which a trial counts as hanging.", min=1)
    ] = 120.0,
    db: DatabaseOption = DEFAULT_DATABASE,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line, one a trial, on stdout.")] = False,
) -> None:
    """Check and time every config of a kernel's grid on every shape; store each result as it comes.

    Run the same command again to continue a sweep that was stopped. Without a GPU the same command checks scaled-down
    shapes on Triton's interpreter and times nothing.
    """
    from fp8tune import render, session
    from fp8tune.records import Problem
    from fp8tune.store import Store

    wish = session.Wish(
        kernels=tuple(kernel or KERNELS),
        shapes=tuple(shapes or ("llama4",)),
        routing=routing,
        grid=tuple(grid or ()),
        arch=arch,
        static=static,
        scale_mode=scale_mode,
        seed=seed,
        timer=timer,
        again=again,
        retry_failed=retry_failed,
        quick=quick,
        time_budget_s=time_budget,
        trial_timeout_s=trial_timeout,
        command=" ".join(["fp8tune", *sys.argv[1:]]),
    )
    job = session.take(wish)
    stored = session.is_stored(db, job)
    if stored and not json:
        render.notice("every trial of this sweep is in the database; --again measures anew")
        with Store.open(db, writable=False) as store:
            winners = session.winners(store, job.laboratory, session.finished_problems(store, job))
        render.print_winners(winners, "table")
        return
    prepared = None if stored else session.prepare(job)
    for line in (prepared or job).notices:
        render.notice(line)
    problems: dict[Problem, None] = {}
    with Store.open(db, create=True) as store, render.SweepProgress() as progress:
        for event in session.run(store, job, prepared):
            progress.show(event)
            if (row := session.row_of(event)) is not None:
                problems[row.problem] = None
                if json:
                    render.print_json_line(row.as_json())
        winners = [] if json else session.winners(store, job.laboratory, problems)
    if winners:
        render.print_winners(winners, "table")


@app.command()
def bench(
    kernel: KernelOption = None,
    op: Annotated[
        Optional[Operation],  # noqa: UP045 - as above
        typer.Option("--op", help="The whole grouped GEMM, forward and backward, instead of single kernels."),
    ] = None,
    shapes: Annotated[
        Optional[list[str]],  # noqa: UP045 - as above
        typer.Option(
            "--shapes", help="A shape set or a path.toml. Repeatable.", show_default="starting-line, or grouped-mm"
        ),
    ] = None,
    routing: Annotated[str, typer.Option(help="How rows spread over groups, as for sweep.")] = "jagged",
    seed: Annotated[int, typer.Option(help="Seeds values and group layouts.")] = 0,
    against: Annotated[
        Optional[list[str]],  # noqa: UP045 - as above
        typer.Option("--against", help="torch.compile or torchao. Repeatable.", show_default="both"),
    ] = None,
    alone: Annotated[bool, typer.Option("--alone", help="Only our kernels and the ceiling.")] = False,
    timer: Annotated[
        Optional[str],  # noqa: UP045 - as above
        typer.Option("--timer", help="simulated:SEED runs on a fake GPU.", show_default="do_bench"),
    ] = None,
    time_budget: Annotated[
        Optional[float],  # noqa: UP045 - as above
        typer.Option("--time-budget", help="Start no new problem after this many seconds; say what was left out."),
    ] = None,
    format: Annotated[
        OperationFormat, typer.Option("--format", help="table or json; with --op also markdown.")
    ] = OperationFormat.TABLE,
) -> None:
    """Time our kernels with their exported configs beside the copy ceiling, torch.compile and torchao. Needs a GPU.

    With --op grouped-mm: FP8 beside bf16 and torchao, forward and backward, and the parts of the step.
    """
    if op is not None:
        if kernel or (against and "torch.compile" in against):
            raise UsageError("--op is timed as a whole, beside bf16 and torchao: leave out --kernel and torch.compile")
        _bench_operation(tuple(shapes or (str(op),)), routing, seed, not alone, timer, time_budget, str(format))
        return
    if format is OperationFormat.MARKDOWN:
        raise UsageError("single kernels are printed as a table or JSON: use --format json, or --op grouped-mm")
    from fp8tune import bench as benchmark
    from fp8tune import render, render_bench, session

    rivals = () if alone else tuple(against or benchmark.RIVALS)
    wish = benchmark.Wish(
        kernels=tuple(dict.fromkeys(kernel or KERNELS)),
        shapes=tuple(shapes or ("starting-line",)),
        routing=routing,
        seed=seed,
        rivals=rivals,
        time_budget_s=time_budget,
    )
    laboratory, notices = session.choose_laboratory(None, timer)
    request = benchmark.prepare(wish, laboratory)
    for line in notices:
        render.notice(line)
    render.notice(f"{len(request.problems)} problems of {len(wish.kernels)} kernels; compiling comes first")
    kernels, done = [], 0
    for event in benchmark.run(request):
        if isinstance(event, benchmark.Row):
            done += 1
            render_bench.show_row(event, done, len(request.problems))
        else:
            kernels.append(event)
    if done < len(request.problems):
        render.notice(f"{len(request.problems) - done} problems left out by the time budget")
    render_bench.print_bench(kernels, rivals, str(format))


def _bench_operation(
    shapes: tuple[str, ...],
    routing: str,
    seed: int,
    with_torchao: bool,
    timer: str | None,
    time_budget_s: float | None,
    output_format: str,
) -> None:
    from fp8tune import bench_grouped, published_grouped, render, render_grouped, session
    from fp8tune.shapes import sweeps_dir

    wish = bench_grouped.Wish(shapes, routing, seed, with_torchao, time_budget_s)
    laboratory, notices = session.choose_laboratory(None, timer)
    problems = bench_grouped.prepare(wish, laboratory)
    for line in notices:
        render.notice(line)
    rows = []
    for row in bench_grouped.run(wish, laboratory, problems):
        rows.append(row)
        render_grouped.show_row(row, len(rows), len(problems))
    if len(rows) < len(problems):
        render.notice(f"{len(problems) - len(rows)} problems left out by the time budget")
    published = published_grouped.read(sweeps_dir() / "published" / "grouped_mm.csv")
    render_grouped.print_grouped(rows, published, output_format)


@app.command()
def calibrate(
    timer: Annotated[
        Optional[str],  # noqa: UP045 - as above
        typer.Option("--timer", help="simulated:SEED calibrates a fake GPU.", show_default="do_bench"),
    ] = None,
    db: DatabaseOption = DEFAULT_DATABASE,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Measure this device's own noise, and how many processes and rounds finals need for it. Takes half a minute.

    Stored in the database: later sweeps on this device go by it.
    """
    from fp8tune import calibrate as calibrating
    from fp8tune import render, render_calibration, session
    from fp8tune.store import Store

    laboratory, notices = session.choose_laboratory(None, timer)
    for line in notices:
        render.notice(line)
    with Store.open(db, create=True) as store:
        for event in calibrating.calibrate(
            store, laboratory, session.calibration_batch(laboratory), command=" ".join(["fp8tune", *sys.argv[1:]])
        ):
            if isinstance(event, calibrating.Calibration):
                render_calibration.print_calibration(event, "json" if json else "table")
            else:
                render.notice(f"process {event.done} of {event.total}")


@app.command()
def show(
    kernel: KernelOption = None,
    arch: ArchOption = None,
    conflicts: Annotated[
        bool, typer.Option("--conflicts", help="Published rows that contradict each other, instead.")
    ] = False,
    db: DatabaseOption = DEFAULT_DATABASE,
    format: Annotated[Format, typer.Option("--format", help="table, json or csv.")] = Format.TABLE,
) -> None:
    """The best config of each problem, with its share of the copy ceiling. Needs no GPU.

    With --kernel also the one config that loses least over all its problems, and what it loses on each.
    """
    from fp8tune import conflicts as contradicting
    from fp8tune import incumbents, names, ranking, render, render_evidence
    from fp8tune.store import Store

    if conflicts and format is Format.CSV:
        raise UsageError("--conflicts prints a table or JSON: use --format json")

    with Store.open(db, writable=False) as store:
        wanted = names.stored_kernels(kernel, store)
        if arch is not None:
            names.check_arch(arch, store)
        chosen = wanted if kernel else [None]
        keep = None if conflicts else ranking.competing
        evidence = [item for name in chosen for item in store.evidence(name, arch, keep=keep)]
    if conflicts:
        render_evidence.print_conflicts(contradicting.conflicts(evidence), str(format))
        return
    winners = ranking.winners(evidence, incumbents.committed)
    if not winners and format is Format.TABLE:
        render.notice(f"no timed rows for this in {db}: run fp8tune sweep, or fp8tune import")
    render.print_winners(winners, str(format))
    if kernel and format is Format.TABLE:
        render_evidence.print_single_bests(ranking.contests(evidence, incumbents.committed))


@app.command(name="static-report")
def static_report(
    kernel: KernelOption = None,
    arch: ArchOption = None,
    db: DatabaseOption = DEFAULT_DATABASE,
    format: Annotated[BenchFormat, typer.Option("--format", help="table or json.")] = BenchFormat.TABLE,
) -> None:
    """How far rows that were only compiled can be trusted; with --arch, how they rank its configs. Needs no GPU.

    The ranking is measured against times where both are stored. Filled by fp8tune sweep --static --arch ARCH.
    """
    from fp8tune import names, ranking, render, render_evidence, static_score
    from fp8tune.store import Store

    with Store.open(db, writable=False) as store:
        wanted = names.stored_kernels(kernel, store)
        if arch is not None:
            names.check_arch(arch, store)
        evidence = store.evidence(arch=arch or static_score.CALIBRATED_ON, keep=ranking.competing)
    found = [item for item in evidence if item.problem.kernel in wanted]
    if arch is not None:
        render_evidence.print_rankings(static_score.rankings(found), arch, str(format))
        return
    calibrations = static_score.calibrations(found)
    if not calibrations:
        command = f"fp8tune sweep --static --arch {static_score.CALIBRATED_ON}"
        render.notice(f"no kernel has both static and measured rows in {db}: run {command}")
    render_evidence.print_calibrations([calibrations[name] for name in wanted if name in calibrations], str(format))


@app.command()
def export(
    arch: Annotated[str, typer.Option("--arch", help="The GPU arch to export, such as sm_90.")],
    kernel: KernelOption = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045 - as above
        typer.Option("--output", help="Write the module here.", show_default="fp8tune_kernels/tables/ARCH.py"),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if the table is stale.")] = False,
    db: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    """Write the best configs of an arch as the Python module that the kernels import. Needs no GPU.

    Prints what the config for any other shape loses where it was chosen and, each shape left out in turn, on shapes
    held out; beside it what the nearest key's row loses there. Kernels with which that is less go by the nearest key.
    The JSON beside the module has both shape by shape.
    """
    from fp8tune import export as exporting
    from fp8tune import incumbents, names, render, render_trust, selecting
    from fp8tune.store import Store

    if kernel and output is None:
        raise UsageError("--kernel makes a table of that kernel alone: say where with --output PATH")
    with Store.open(db, writable=False) as store:
        names.check_arch(arch, store)
        wanted = names.stored_kernels(kernel, store) if kernel else None
        evidence = selecting.evidence_for(store, arch)
    table = exporting.render(evidence, arch, kernels=wanted, incumbents=incumbents.committed)
    path = output or exporting.table_path(arch)
    for line in table.notices:
        render.notice(line)
    if check:
        stale = exporting.stale(table, path)
        print(f"{path}: {'stale, run fp8tune export --arch ' + arch if stale else 'up to date'}")
        raise typer.Exit(1 if stale else 0)
    print(f"{path}: {'written' if exporting.write(table, path) else 'unchanged'}")
    render_trust.print_robust(table.robust, table.nearest)


@app.command()
def lint(
    kernel: Annotated[str, typer.Argument(help="A kernel, as for sweep --kernel.")],
    shapes: Annotated[
        Optional[list[str]],  # noqa: UP045 - as above
        typer.Option("--shapes", help="A shape set or a path.toml. Repeatable.", show_default="starting-line"),
    ] = None,
    routing: Annotated[str, typer.Option(help="How rows spread over groups where the pick is made.")] = "jagged",
    grid: Annotated[
        Optional[list[str]],  # noqa: UP045 - as above
        typer.Option("--grid", help="Narrow an axis, and so the time it takes: num_stages=1. Repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seeds values and group layouts.")] = 0,
    timer: Annotated[
        Optional[str],  # noqa: UP045 - as above
        typer.Option("--timer", help="simulated:SEED runs on a fake GPU.", show_default="do_bench"),
    ] = None,
    time_budget: Annotated[
        Optional[float],  # noqa: UP045 - as above
        typer.Option("--time-budget", help="Screen no new problem after this many seconds; say what was left out."),
    ] = None,
    db: Annotated[
        Optional[str],  # noqa: UP045 - as above
        typer.Option("--db", help="Keep the rows there, and continue from them.", show_default="a temporary one"),
    ] = None,
    format: Annotated[BenchFormat, typer.Option("--format", help="table or json.")] = BenchFormat.TABLE,
) -> None:
    """Whether a kernel's lookup key holds all that moves its winner. Needs a GPU.

    Varies every argument that the key leaves out (the exact M, the routing, the seed and others), one at a time, and
    times what the pick of the key loses there. Exit code 1 where fresh processes prove that it is more than the tie
    band, 3 where they leave that unclear.
    """
    from fp8tune import lint as linting
    from fp8tune import render, render_trust

    wish = linting.Wish(
        kernel=kernel,
        shapes=tuple(shapes or ("starting-line",)),
        routing=routing,
        grid=tuple(grid or ()),
        seed=seed,
        timer=timer,
        time_budget_s=time_budget,
    )
    job = linting.prepare(wish)
    for line in (*job.notices, *job.faults):
        render.notice(line)
    if job.faults:
        raise typer.Exit(1)
    with linting.opened(db) as store, render.SweepProgress() as progress:
        report = linting.Report((), 0)
        for event in linting.run(store, job):
            if isinstance(event, linting.Report):
                report = event
            else:
                progress.show(event)
    if report.left_out:
        render.notice(f"{report.left_out} variations left out by the time budget")
    render_trust.print_lint(job, report, str(format))
    raise typer.Exit(report.exit_code)


@app.command(name="import")
def import_(
    file: Annotated[Path, typer.Argument(help="Another fp8tune database, or a CSV of published measurements.")],
    db: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    """Merge another database (all rows kept), or published rows with their source.

    Published configs of our kernels are compiled for their arch, so that export knows whether they would fit.
    """
    from fp8tune import importing, render, session
    from fp8tune.store import Store

    importing.check_importable(file)
    with Store.open(db, create=True) as store:
        report = importing.import_file(store, file, lookup_key=session.lookup_key)
        print(f"{file}: {report.added} rows added, {report.already_there} already there")
        for winner in session.disputes(store) if report.added else ():
            where = f"{winner.problem.kernel} {winner.problem.shape} on {winner.device.name}"
            render.notice(f"{where}: finals of two sides disagree, ambiguous until fp8tune sweep has run there again")
        if file.suffix == ".csv":  # also with nothing new: the kernels may have changed since they were compiled
            with render.SweepProgress() as progress:
                for event in session.compile_published(store):
                    progress.show(event)


@app.command()
def compare(
    revisions: Annotated[
        str, typer.Argument(help="A..B, or A...B from their merge base; WORKTREE is uncommitted work.", metavar="A..B")
    ],
    kernel: KernelOption = None,
    repo: Annotated[Path, typer.Option("--repo", help="The git repository that holds both revisions.")] = Path("."),
    shapes: Annotated[
        Optional[list[str]],  # noqa: UP045 - as above
        typer.Option("--shapes", help="A shape set or a path.toml. Repeatable.", show_default="llama4"),
    ] = None,
    routing: Annotated[str, typer.Option(help="How rows spread over groups, as for sweep.")] = "jagged",
    scale_mode: Annotated[
        Optional[str],  # noqa: UP045 - as above
        typer.Option("--scale-mode", help="As for sweep.", show_default="the kernel's first"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seeds values and group layouts.")] = 0,
    configs: Annotated[
        CompareConfigs, typer.Option("--configs", help="Each side's own table; the first side's on both; tuned anew.")
    ] = CompareConfigs.OWN,
    blind: Annotated[
        bool, typer.Option("--blind", help="Time identical code, too: A..A shows what this machine makes of nothing.")
    ] = False,
    timer: Annotated[
        Optional[str],  # noqa: UP045 - as above
        typer.Option("--timer", help="simulated:SEED runs on a fake GPU.", show_default="do_bench"),
    ] = None,
    from_db: Annotated[bool, typer.Option("--from-db", help="Run nothing: compare recorded rows.")] = False,
    db: DatabaseOption = DEFAULT_DATABASE,
    format: Annotated[
        CompareFormat, typer.Option("--format", help="table, markdown, json or html.")
    ] = CompareFormat.TABLE,
) -> None:
    """Whether a change made kernels slower, faster or wrong: both revisions built, checked and timed in turns.

    Without a GPU, or with --from-db, from recorded rows. Exit code 1: a regression or newly wrong bytes; 3: a row is
    open, or the control arm was not quiet; 0: neither.
    """
    from fp8tune import compare as comparing
    from fp8tune import live, pairing, render, render_compare, session
    from fp8tune.comparison import Comparison
    from fp8tune.store import Store

    laboratory, notices = session.choose_laboratory(None, timer)
    if from_db or not laboratory.times:
        with Store.open(db, writable=False) as store:
            comparison = comparing.compare(store.evidence(), repo, revisions, kernels=kernel)
        if not from_db:
            render.notice("no GPU here: from recorded rows, as with --from-db")
    else:
        wish = live.Wish(
            revisions=revisions,
            repository=repo,
            kernels=tuple(dict.fromkeys(kernel or ())),
            shapes=tuple(shapes or ("llama4",)),
            routing=routing,
            scale_mode=scale_mode,
            seed=seed,
            configs=pairing.Configs(configs),
            blind=blind,
        )
        for line in notices:
            render.notice(line)
        with render_compare.CompareProgress() as progress:
            for event in live.compare(wish, laboratory):
                progress.show(event)
        assert isinstance(event, Comparison)  # the last one is
        comparison = event
    for line in comparison.notices:
        render.notice(line)
    render_compare.print_comparison(comparison, str(format))
    raise typer.Exit(comparison.exit_code)


@app.command()
def doctor(
    db: DatabaseOption = DEFAULT_DATABASE,
    json: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
) -> None:
    """What is wrong with this machine, the database or the tables, and what to do about each."""
    from fp8tune import doctor as checking
    from fp8tune import render

    findings = checking.diagnose(db)
    render.print_findings(findings, "json" if json else "table")
    raise typer.Exit(1 if any(finding.level == "error" for finding in findings) else 0)


def main() -> None:
    """The console script: one place where errors become a line and an exit code."""
    gc.set_threshold(100_000)  # at Python's own, a short command spends a tenth of its time looking for garbage
    try:
        code = app(standalone_mode=False)
    except Fp8tuneError as error:
        _fail(str(error), error.exit_code)
    except COMMAND_LINE_ERRORS as error:
        _fail(f"{' '.join(str(error).split())} (see fp8tune --help)", UsageError.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("stopped; every finished trial is stored, the same command continues", 130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left; nothing more to say
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    print(f"fp8tune: {message if message.isprintable() else ascii(message)[1:-1]}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
