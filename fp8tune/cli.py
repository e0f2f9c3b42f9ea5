"""Parse, call one function, print. Heavy imports live inside the commands: ``--help`` takes a tenth of a second."""

from __future__ import annotations

import enum
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
    """What ``bench`` prints."""

    TABLE = "table"
    JSON = "json"


class CompareFormat(enum.StrEnum):
    """What ``compare`` prints."""

    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"


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
    quick: Annotated[bool, typer.Option("--quick", help="The screen alone (all there is so far).")] = False,
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
    shapes: Annotated[
        Optional[list[str]],  # noqa: UP045 - as above
        typer.Option("--shapes", help="A shape set or a path.toml. Repeatable.", show_default="starting-line"),
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
    format: Annotated[BenchFormat, typer.Option("--format", help="table or json.")] = BenchFormat.TABLE,
) -> None:
    """Time our kernels with their exported configs beside the copy ceiling, torch.compile and torchao. Needs a GPU."""
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


@app.command()
def show(
    kernel: KernelOption = None,
    arch: ArchOption = None,
    db: DatabaseOption = DEFAULT_DATABASE,
    format: Annotated[Format, typer.Option("--format", help="table, json or csv.")] = Format.TABLE,
) -> None:
    """The best config of each problem, with its share of the copy ceiling. Needs no GPU."""
    from fp8tune import names, ranking, render
    from fp8tune.store import Store

    with Store.open(db, writable=False) as store:
        wanted = names.stored_kernels(kernel, store)
        if arch is not None:
            names.check_arch(arch, store)
        chosen = wanted if kernel else [None]
        evidence = [item for name in chosen for item in store.evidence(name, arch, keep=ranking.competing)]
    winners = ranking.winners(evidence)
    if not winners and format is Format.TABLE:
        render.notice(f"no timed rows for this in {db}: run fp8tune sweep, or fp8tune import")
    render.print_winners(winners, str(format))


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
    """Write the best configs of an arch as the Python module that the kernels import. Needs no GPU."""
    from fp8tune import export as exporting
    from fp8tune import names, ranking, render
    from fp8tune.store import Store

    if kernel and output is None:
        raise UsageError("--kernel makes a table of that kernel alone: say where with --output PATH")
    with Store.open(db, writable=False) as store:
        names.check_arch(arch, store)
        wanted = names.stored_kernels(kernel, store) if kernel else None
        evidence = store.evidence(arch=arch, keep=ranking.competing)
    table = exporting.render(evidence, arch, kernels=wanted)
    path = output or exporting.table_path(arch)
    for line in table.notices:
        render.notice(line)
    if check:
        stale = exporting.stale(table, path)
        print(f"{path}: {'stale, run fp8tune export --arch ' + arch if stale else 'up to date'}")
        raise typer.Exit(1 if stale else 0)
    print(f"{path}: {'written' if exporting.write(table, path) else 'unchanged'}")


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
        if report.added and file.suffix == ".csv":
            with render.SweepProgress() as progress:
                for event in session.compile_published(store):
                    progress.show(event)


@app.command()
def compare(
    revisions: Annotated[str, typer.Argument(help="A..B, or A...B from their merge base.", metavar="A..B")],
    kernel: KernelOption = None,
    repo: Annotated[Path, typer.Option("--repo", help="The git repository that holds both revisions.")] = Path("."),
    db: DatabaseOption = DEFAULT_DATABASE,
    format: Annotated[CompareFormat, typer.Option("--format", help="table, markdown or json.")] = CompareFormat.TABLE,
) -> None:
    """What changed between two revisions, from recorded rows matched by the kernels' source at each revision."""
    from fp8tune import compare as comparing
    from fp8tune import render
    from fp8tune.store import Store

    with Store.open(db, writable=False) as store:
        comparison = comparing.compare(store.evidence(), repo, revisions, kernels=kernel)
    for line in comparison.notices:
        render.notice(line)
    render.print_comparison(comparison, str(format))
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
