"""What ``fp8tune bench`` prints: a table a kernel, as markdown too, with its means and host times, or a JSON list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from fp8tune.bench.cells import Timing
from fp8tune.bench.kernels import Ceiling, Kernel, Row
from fp8tune.bench.warming import Compiled
from fp8tune.ceiling import Bound
from fp8tune.records import is_recorded
from fp8tune.render import contracts
from fp8tune.render.progress import Display
from fp8tune.render.report import Column, Report, left, print_parts, right
from fp8tune.render.terminal import AT_MOST, checked, layout_name, microseconds, print_json, rate, share, times
from fp8tune_kernels.spec import CHECKS


def print_bench(kernels: Sequence[Kernel], rivals: Sequence[str], output_format: str) -> None:
    """Everything that was timed: ``table``, ``markdown`` or ``json``."""
    ceiling = Ceiling.of([row for kernel in kernels for row in kernel.rows])
    if output_format == "json":
        print_json(contracts.bench(kernels, ceiling, rivals))
        return
    bullet = "- " if output_format == "markdown" else ""
    for kernel in kernels:
        below = (bullet + line for line in _below(kernel, rivals, ceiling))
        print_parts([_report(kernel, rivals, ceiling), *below, ""], output_format)


class BenchProgress(Display):
    """A line a problem, with every output that is wrong, and the bar; before that what is compiled."""

    def compiled(self, event: Compiled) -> None:
        """One more is compiled."""
        self.update("compiling", event.done, event.total)

    def timed(self, text: str, done: int, total: int) -> None:
        """One more problem is timed."""
        self.line(f"[{done}/{total}] {text}")
        self.update("timing", done, total, detail=text)


def row_line(row: Row) -> str:
    """One problem in a line, with every output that is wrong."""
    ours = row.timings["fp8tune"]
    said = f"{microseconds(ours.time_us)} us" if ours.time_us else ours.reason
    wrong = [f"{name} {timing.reason}" for name, timing in row.timings.items() if timing.time_us and timing.reason]
    return f"{row.problem.kernel} {_shape(row)}: {', '.join([said, *wrong])}"


def _report(kernel: Kernel, rivals: Sequence[str], ceiling: Ceiling) -> Report[Row]:
    first = kernel.rows[0]
    said = [f"{kernel.name} on {first.device.name} ({first.device.arch})", f"seed {first.problem.seed}"]
    if kernel.check != CHECKS[0]:
        said.append(checked(kernel.check))
    if is_recorded(first.problem):
        said.append(AT_MOST)
    columns: list[Column[Row]] = [
        left("shape", _shape),
        left("routing", lambda row: row.problem.routing),
        left("config", lambda row: str(row.timings["fp8tune"].config or "")),
        right("us", _time("fp8tune")),
        right("GB/s", lambda row: _invalid(row.timings["fp8tune"]) or rate(row.gb_per_s)),
        right("of ceiling", lambda row: share(ceiling.share(row))),
    ]
    if any(ceiling.bound(row) is Bound.COMPUTE for row in kernel.rows):
        columns.append(left("bound", lambda row: str(ceiling.bound(row) or "")))
    for name in rivals:
        columns += [right(f"{name} us", _time(name)), right("ratio", _ratio(name))]
    return Report(", ".join(said), columns, kernel.rows)


def _time(name: str) -> Callable[[Row], str]:
    return lambda row: microseconds(row.timings[name].time_us, "-")


def _ratio(name: str) -> Callable[[Row], str]:
    return lambda row: _invalid(row.timings[name]) or times(row.ratio(name))


def _invalid(timing: Timing) -> str:
    """Why a time counts for nothing: ``wrong: 84 % of codes, 31 % of scales``."""
    return "" if timing.time_us is None else timing.reason


def _shape(row: Row) -> str:
    shape = f"{row.problem.shape} {layout_name(row.problem.input_layout)}".removesuffix(" contiguous")
    return f"{shape} {row.problem.in_dtype}".removesuffix(" bfloat16")


def _below(kernel: Kernel, rivals: Sequence[str], ceiling: Ceiling) -> Iterator[str]:
    if ceiling.gb_per_s is not None:
        yield f"ceiling: {rate(ceiling.gb_per_s)} GB/s, a copy in this run or the fastest kernel of it"
    for name in rivals:
        ratios = [row.ratio(name) for row in kernel.rows]
        if (mean := kernel.geomean(name)) is not None:
            counted = f"{len(ratios) - ratios.count(None)} of {len(ratios)} problems"
            yield f"geometric mean: {times(mean)} as fast as {name}" + (f", on {counted}" if None in ratios else "")
    if hosts := [f"{name} {microseconds(timing.time_us, '-')}" for name, timing in kernel.hosts.items()]:
        yield f"host us of one call on a 64x64 input: {', '.join(hosts)}"
    cells = [(name, timing, _shape(row)) for row in kernel.rows for name, timing in row.timings.items()]
    cells += [("the copy", row.copy, "512 MiB") for row in kernel.rows[:1]]
    cells += [(name, timing, "a 64x64 input") for name, timing in kernel.hosts.items()]
    yield from reasons((name, timing.reason, where) for name, timing, where in cells if timing.time_us is None)


def reasons(cells: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Of (contender, reason, where): each reason once, with the first place it was given for."""
    first: dict[tuple[str, str], str] = {}
    for name, reason, where in cells:
        first.setdefault((name, reason), where)
    return (f"{name} on {where}: {reason}" for (name, reason), where in first.items())
