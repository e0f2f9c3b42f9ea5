"""``fp8tune bench``, with ``--op`` too."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from fp8tune.commands.options import (
    KernelOption,
    OperationName,
    RoutingOption,
    SeedOption,
    TimeBudgetOption,
    TimerOption,
    shapes_option,
)
from fp8tune.errors import UsageError
from fp8tune_kernels.catalog import KERNELS


class OutputFormat(enum.StrEnum):
    """What ``bench`` prints."""

    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"


def bench(
    kernel: KernelOption = None,
    op: Annotated[
        OperationName | None,
        typer.Option("--op", help="The whole grouped GEMM, forward and backward, instead of single kernels."),
    ] = None,
    shapes: Annotated[list[str] | None, shapes_option("starting-line, or grouped-mm")] = None,
    routing: RoutingOption = "jagged",
    seed: SeedOption = 0,
    against: Annotated[
        list[str] | None,
        typer.Option("--against", help="torch.compile or torchao. Repeatable.", show_default="both"),
    ] = None,
    alone: Annotated[bool, typer.Option("--alone", help="Only our kernels and the ceiling.")] = False,
    timer: TimerOption = None,
    time_budget: TimeBudgetOption = None,
    format: Annotated[OutputFormat, typer.Option("--format", help="table, markdown or json.")] = OutputFormat.TABLE,
) -> None:
    """Time our kernels with their exported configs beside torch.compile and torchao. Needs a GPU.

    The ceiling is what memory gives: a copy in the same run, or the fastest kernel of it where that is faster.

    Every output is compared with our reference first, byte for byte. A contender whose bytes are other is named wrong,
    with the share, and is in no ratio. Exit code 1 where ours is.

    With --op: FP8 or MXFP8 beside bf16 and torchao, forward and backward, and the parts of the step. A result with an
    SQNR under 20 dB in any group is wrong. MXFP8 is emulated, and says so, where the GPU has no units for it.
    """
    if op is not None:
        if kernel or (against and "torch.compile" in against):
            raise UsageError("--op is timed as a whole, beside bf16 and torchao: leave out --kernel and torch.compile")
        _bench_operation(op, shapes, routing, seed, not alone, timer, time_budget, str(format))
        return
    from fp8tune.bench import kernels as benchmark
    from fp8tune.render import bench as render_bench
    from fp8tune.render import terminal as render
    from fp8tune.sweep import session

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
    try:
        for event in benchmark.run(request):
            if isinstance(event, benchmark.Row):
                done += 1
                render_bench.show_row(event, done, len(request.problems))
            elif isinstance(event, benchmark.Kernel):
                kernels.append(event)
            else:
                render_bench.show_compiled(event)
    finally:  # who stops it gets what it has
        if done < len(request.problems):
            render.notice(f"{len(request.problems) - done} problems left out")
        timed = [kernel for kernel in kernels if kernel.rows]
        if unclocked := [kernel.name for kernel in timed if not kernel.hosts]:
            render.notice(f"host times left out: {', '.join(unclocked)}")
        render_bench.print_bench(timed, rivals, str(format))
    if any(row.is_wrong for kernel in timed for row in kernel.rows):
        render.notice("our own output is wrong: see above")
        raise typer.Exit(1)


def _bench_operation(
    op: OperationName,
    shapes: list[str] | None,
    routing: str,
    seed: int,
    with_torchao: bool,
    timer: str | None,
    time_budget_s: float | None,
    output_format: str,
) -> None:
    from fp8tune.bench import grouped as bench_grouped
    from fp8tune.bench.grouped_cells import OPERATIONS
    from fp8tune.bench.operation import SHAPES
    from fp8tune.plan.shapes import sweeps_dir
    from fp8tune.render import bench as render_bench
    from fp8tune.render import grouped as render_grouped
    from fp8tune.render import terminal as render
    from fp8tune.store import published as store_published
    from fp8tune.sweep import session

    operation = OPERATIONS[op]
    wish = bench_grouped.Wish(operation, tuple(shapes or (SHAPES,)), routing, seed, with_torchao, time_budget_s)
    laboratory, notices = session.choose_laboratory(None, timer)
    problems = bench_grouped.prepare(wish, laboratory)
    for line in notices:
        render.notice(line)
    published = [row for row in store_published.read(sweeps_dir() / "published" / "grouped_mm.csv") if op.covers(row)]
    rows: list[bench_grouped.Row] = []
    try:
        for event in bench_grouped.run(wish, laboratory, problems):
            if isinstance(event, bench_grouped.Row):
                rows.append(event)
                render_grouped.show_row(event, len(rows), len(problems))
            else:
                render_bench.show_compiled(event)
    finally:  # who stops it gets what it has
        if len(rows) < len(problems):
            render.notice(f"{len(problems) - len(rows)} problems left out")
        render_grouped.print_grouped(rows, published, output_format)
    if any(operation.ours in row.wrong for row in rows):
        render.notice("our own output is wrong: see above")
        raise typer.Exit(1)
