"""``fp8tune bench``, with ``--op`` too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import typer

from fp8tune.cli.adapter import command
from fp8tune.options import BenchOptions

if TYPE_CHECKING:
    from fp8tune.bench.options import BenchOptions as Request
    from fp8tune.measure.engine import Backend


@command(BenchOptions, epilog="$ fp8tune bench --op moe-layer --shapes models")
def bench(options: BenchOptions) -> None:
    """Time the FP8 kernels and layers beside other libraries.

    Needs a GPU. A contender with a different output is marked wrong and excluded from all ratios. Exits 1 if an output
    of fp8tune-kernels is wrong.
    """
    from fp8tune.bench import options as parsed
    from fp8tune.bench.cells import CELL_TIMEOUT_S
    from fp8tune.measure.backends.choice import backend_for
    from fp8tune.render import terminal as render

    backend, notices = backend_for(None, None, trial_timeout_s=CELL_TIMEOUT_S)
    request = parsed.BenchOptions(
        kernels=options.kernel,
        op=None if options.op is None else parsed.OperationName(options.op),
        shapes=(options.shapes,) if options.shapes else (),
        against=tuple(name for name in options.against if name != "none"),
        alone="none" in options.against,
    )
    if (_bench_kernels if request.op is None else _bench_operation)(request, options.format, backend, notices):
        render.notice("our own output is wrong: see above")
        raise typer.Exit(1)


def _bench_kernels(options: Request, output_format: str, backend: Backend, notices: Iterable[str]) -> bool:
    """True if an output of ours is wrong."""
    from fp8tune.bench import kernels as benchmark
    from fp8tune.render import bench as render_bench
    from fp8tune.render import terminal as render

    plan = benchmark.planned(options, backend)
    notices = [*notices, f"{len(plan)} problems of {len(plan.problems)} kernels; compiling comes first"]
    events = benchmark.run(backend, plan, options.time_budget_s)
    found: list[benchmark.Row | benchmark.Kernel] = []
    try:
        _show_progress(events, found, len(plan), notices, benchmark.Row, render_bench.row_line)
    finally:  # who stops it gets what it has
        timed = [kernel for kernel in found if isinstance(kernel, benchmark.Kernel) and kernel.rows]
        if unclocked := [kernel.name for kernel in timed if not kernel.hosts]:
            render.notice(f"host times left out: {', '.join(unclocked)}")
        render_bench.print_bench(timed, options.rivals, output_format)
    return any(row.is_wrong for kernel in timed for row in kernel.rows)


def _bench_operation(options: Request, output_format: str, backend: Backend, notices: Iterable[str]) -> bool:
    """True if a result of ours is wrong."""
    from fp8tune.bench import grouped as benchmark
    from fp8tune.importing.published import read_operations
    from fp8tune.plan.shapes import sweeps_dir
    from fp8tune.render import grouped as render_grouped

    problems = benchmark.problems_of(options, backend)
    published = read_operations(sweeps_dir() / "published" / "grouped_mm.csv")
    events = benchmark.run(
        backend, problems, options.time_budget_s, benchmark.Extent(not options.alone, options.variants)
    )
    rows: list[benchmark.Row] = []
    try:
        _show_progress(events, rows, len(problems), notices, benchmark.Row, render_grouped.row_line)
    finally:  # who stops it gets what it has
        covered = [row for row in published if options.op and options.op.covers(row)]
        render_grouped.print_grouped(rows, covered, output_format)
    return any(row.ours_are_wrong for row in rows)


def _show_progress(
    events: Iterable[Any], found: list[Any], total: int, notices: Iterable[str], row: type, line: Callable[[Any], str]
) -> None:
    """Add what is timed to ``found`` as it comes, and say how far it is; at last how many rows are left out."""
    from fp8tune.bench.warming import Compiled
    from fp8tune.render import terminal as render
    from fp8tune.render.bench import BenchProgress

    for notice in notices:
        render.notice(notice)
    done = 0
    try:
        with BenchProgress() as progress:
            for event in events:
                if isinstance(event, Compiled):
                    progress.compiled(event)
                    continue
                found.append(event)
                if isinstance(event, row):
                    done += 1
                    progress.timed(line(event), done, total)
    finally:
        if done < total:
            render.notice(f"{total - done} problems left out")
