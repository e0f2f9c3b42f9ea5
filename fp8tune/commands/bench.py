"""``fp8tune bench``, with ``--op`` too."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from fp8tune.commands.options import KernelOption
from fp8tune.errors import UsageError
from fp8tune_kernels.catalog import KERNELS


class Operation(enum.StrEnum):
    """What ``bench`` times beside single kernels."""

    GROUPED_MM = "grouped-mm"


class OperationFormat(enum.StrEnum):
    """What ``bench`` prints."""

    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"


def bench(
    kernel: KernelOption = None,
    op: Annotated[
        Operation | None,
        typer.Option("--op", help="The whole grouped GEMM, forward and backward, instead of single kernels."),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--shapes", help="A shape set or a path.toml. Repeatable.", show_default="starting-line, or grouped-mm"
        ),
    ] = None,
    routing: Annotated[str, typer.Option(help="How rows spread over groups, as for sweep.")] = "jagged",
    seed: Annotated[int, typer.Option(help="Seeds values and group layouts.")] = 0,
    against: Annotated[
        list[str] | None,
        typer.Option("--against", help="torch.compile or torchao. Repeatable.", show_default="both"),
    ] = None,
    alone: Annotated[bool, typer.Option("--alone", help="Only our kernels and the ceiling.")] = False,
    timer: Annotated[
        str | None,
        typer.Option("--timer", help="simulated:SEED runs on a fake GPU.", show_default="do_bench"),
    ] = None,
    time_budget: Annotated[
        float | None,
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
    from fp8tune.bench import grouped as bench_grouped
    from fp8tune.bench import published as published_grouped
    from fp8tune.plan.shapes import sweeps_dir
    from fp8tune.render import grouped as render_grouped
    from fp8tune.render import terminal as render
    from fp8tune.sweep import session

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
