"""``fp8tune bench``, with ``--op`` too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from fp8tune.bench.options import BenchOptions
from fp8tune.options import OperationName

if TYPE_CHECKING:
    from fp8tune.measure.engine import Backend


def bench(options: BenchOptions) -> None:
    """Time our kernels with their exported configs beside torch.compile and torchao. Needs a GPU.

    The ceiling is what memory gives: a copy in the same run, or the fastest kernel of it where that is faster.

    Every output is compared with our reference first, byte for byte. A contender whose bytes are other is named wrong,
    with the share, and is in no ratio. Exit code 1 where ours is.

    With --op: FP8 or MXFP8 beside bf16 and torchao, forward and backward, and the parts of the step. A result with an
    SQNR under 20 dB in any group is wrong. MXFP8 is emulated, and says so, where the GPU has no units for it.
    """
    from fp8tune.bench.cells import CELL_TIMEOUT_S
    from fp8tune.measure.backends.choice import backend_for
    from fp8tune.render import terminal as render

    backend, notices = backend_for(None, options.timer, trial_timeout_s=CELL_TIMEOUT_S)
    if options.op is None:
        is_wrong = _bench_kernels(options, backend, notices)
    else:
        is_wrong = _bench_operation(options, options.op, backend, notices)
    if is_wrong:
        render.notice("our own output is wrong: see above")
        raise typer.Exit(1)


def _bench_kernels(options: BenchOptions, backend: Backend, notices: Iterable[str]) -> bool:
    """True if an output of ours is wrong."""
    from fp8tune.bench import kernels as benchmark
    from fp8tune.render import bench as render_bench
    from fp8tune.render import terminal as render

    plan = benchmark.planned(options, backend)
    for line in notices:
        render.notice(line)
    render.notice(f"{len(plan)} problems of {len(plan.problems)} kernels; compiling comes first")
    kernels, done = [], 0
    try:
        with render_bench.BenchProgress() as progress:
            for event in benchmark.run(backend, plan, options.time_budget_s):
                if isinstance(event, benchmark.Row):
                    done += 1
                    progress.timed(render_bench.row_line(event), done, len(plan))
                elif isinstance(event, benchmark.Kernel):
                    kernels.append(event)
                else:
                    progress.compiled(event)
    finally:  # who stops it gets what it has
        if done < len(plan):
            render.notice(f"{len(plan) - done} problems left out")
        timed = [kernel for kernel in kernels if kernel.rows]
        if unclocked := [kernel.name for kernel in timed if not kernel.hosts]:
            render.notice(f"host times left out: {', '.join(unclocked)}")
        render_bench.print_bench(timed, options.rivals, str(options.format))
    return any(row.is_wrong for kernel in timed for row in kernel.rows)


def _bench_operation(options: BenchOptions, op: OperationName, backend: Backend, notices: Iterable[str]) -> bool:
    """True if a result of ours is wrong."""
    from fp8tune.bench import grouped as benchmark
    from fp8tune.plan.shapes import sweeps_dir
    from fp8tune.render import bench as render_bench
    from fp8tune.render import grouped as render_grouped
    from fp8tune.render import terminal as render
    from fp8tune.store.published import read_operations

    problems = benchmark.problems_of(options, backend)
    for line in notices:
        render.notice(line)
    published = [row for row in read_operations(sweeps_dir() / "published" / "grouped_mm.csv") if op.covers(row)]
    rows: list[benchmark.Row] = []
    try:
        with render_bench.BenchProgress() as progress:
            for event in benchmark.run(
                backend, problems, with_torchao=not options.alone, time_budget_s=options.time_budget_s
            ):
                if isinstance(event, benchmark.Row):
                    rows.append(event)
                    progress.timed(render_grouped.row_line(event), len(rows), len(problems))
                else:
                    progress.compiled(event)
    finally:  # who stops it gets what it has
        if len(rows) < len(problems):
            render.notice(f"{len(problems) - len(rows)} problems left out")
        render_grouped.print_grouped(rows, published, str(options.format))
    return any(row.operation.ours in row.wrong for row in rows)
