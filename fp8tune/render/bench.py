"""What ``fp8tune bench`` prints: a table a kernel, as markdown too, with its means and host times, or a JSON list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fp8tune.render.terminal import microseconds, notice, print_json, share, visible
from fp8tune.render.wide import Columns, print_wide

if TYPE_CHECKING:
    from fp8tune.bench.cells import Timing
    from fp8tune.bench.kernels import Ceiling, Kernel, Row
    from fp8tune.bench.warming import Compiled


def print_bench(kernels: Sequence[Kernel], rivals: Sequence[str], output_format: str) -> None:
    """Everything that was timed: ``table``, ``markdown`` or ``json``."""
    from fp8tune.bench.kernels import Ceiling

    ceiling = Ceiling.of([row for kernel in kernels for row in kernel.rows])
    if output_format == "json":
        objects = [row_json(row, ceiling) for kernel in kernels for row in kernel.rows]
        print_json([*objects, *(kernel_json(kernel, rivals) for kernel in kernels)])
        return
    for kernel in kernels:
        _print_kernel(kernel, rivals, ceiling, output_format)


def show_row(row: Row, done: int, total: int) -> None:
    """A line of progress on stderr, with every output that is wrong."""
    ours = row.timings["fp8tune"]
    said = f"{microseconds(ours.time_us)} us" if ours.time_us else ours.reason
    wrong = [f"{name} {timing.reason}" for name, timing in row.timings.items() if timing.time_us and timing.reason]
    notice(f"[{done}/{total}] {row.problem.kernel} {_shape(row)}: {', '.join([said, *wrong])}")


def show_compiled(compiled: Compiled) -> None:
    """A line at each quarter of what is compiled before anything is timed."""
    done, total = compiled.done, compiled.total
    if 4 * done // total > 4 * (done - 1) // total:
        notice(f"compiling {done}/{total}, ETA {compiled.left_s:.0f} s")


def row_json(row: Row, ceiling: Ceiling) -> Mapping[str, object]:
    """One problem: times in microseconds, rates in GB/s, ratios above 1 where ours is faster.

    A wrong output has its time, its reason and its shares of wrong bytes, and no ratio.
    """
    ours = row.timings["fp8tune"]
    rivals = {
        name: {"time_us": timing.time_us, "ratio": row.ratio(name), "reason": timing.reason, **_wrong_json(timing)}
        for name, timing in row.timings.items()
        if name != "fp8tune"
    }
    return {
        "row": "problem",
        "kernel": row.problem.kernel,
        "arch": row.device.arch,
        "device": row.device.name,
        "torch": row.device.torch,
        "triton": row.device.triton,
        "shape": dict(row.problem.shape),
        "routing": row.problem.routing,
        "input_layout": row.problem.input_layout,
        "in_dtype": row.problem.in_dtype,
        "fp8_dtype": row.problem.fp8_dtype,
        "scale_mode": row.problem.scale_mode,
        "seed": row.problem.seed,
        "config": None if ours.config is None else dict(ours.config),
        "bytes_moved": row.bytes_moved,
        "time_us": row.time_us,
        "reason": ours.reason,
        **_wrong_json(ours),
        "gb_per_s": row.gb_per_s,
        "ceiling_us": ceiling.time_us(row),
        "ceiling_gb_per_s": ceiling.gb_per_s,
        "ceiling_share": ceiling.share(row),
        "ceiling_reason": row.copy.reason,
        "rivals": rivals,
    }


def _wrong_json(timing: Timing) -> Mapping[str, float | None]:
    """Shares of wrong elements, 0 to 1; null where nothing was compared."""
    checked = timing.checked
    return {
        "wrong_codes_share": checked.codes.share if checked else None,
        "wrong_scales_share": checked.scales.share if checked else None,
    }


def kernel_json(kernel: Kernel, rivals: Sequence[str]) -> Mapping[str, object]:
    """A kernel's geometric means, and the host time of one call on a 64x64 input."""
    return {
        "row": "kernel",
        "kernel": kernel.name,
        "geomean_ratio": {name: kernel.geomean(name) for name in rivals},
        "host": {name: {"time_us": timing.time_us, "reason": timing.reason} for name, timing in kernel.hosts.items()},
    }


def _print_kernel(kernel: Kernel, rivals: Sequence[str], ceiling: Ceiling, output_format: str) -> None:
    device = kernel.rows[0].device
    columns: Columns = [("shape", "left"), ("routing", "left"), ("config", "left"), ("us", "right"), ("GB/s", "right")]
    columns += [("of ceiling", "right")]
    for name in rivals:
        columns += [(f"{name} us", "right"), ("ratio", "right")]
    seed = kernel.rows[0].problem.seed
    title = f"{kernel.name} on {device.name} ({device.arch}), seed {seed}"
    print_wide(title, columns, [_cells(row, rivals, ceiling) for row in kernel.rows], output_format)
    for line in _below(kernel, rivals, ceiling):
        print(f"- {visible(line)}" if output_format == "markdown" else visible(line))
    print()


def _below(kernel: Kernel, rivals: Sequence[str], ceiling: Ceiling) -> Iterator[str]:
    if ceiling.gb_per_s is not None:
        yield f"ceiling: {_rate(ceiling.gb_per_s)} GB/s, a copy in this run or the fastest kernel of it"
    for name in rivals:
        ratios = [row.ratio(name) for row in kernel.rows]
        if (mean := kernel.geomean(name)) is not None:
            counted = f"{len(ratios) - ratios.count(None)} of {len(ratios)} problems"
            yield f"geometric mean: {mean:.2f}x as fast as {name}" + (f", on {counted}" if None in ratios else "")
    if hosts := [f"{name} {microseconds(timing.time_us) or '-'}" for name, timing in kernel.hosts.items()]:
        yield f"host us of one call on a 64x64 input: {', '.join(hosts)}"
    yield from _reasons(kernel)


def _cells(row: Row, rivals: Sequence[str], ceiling: Ceiling) -> list[str]:
    ours = row.timings["fp8tune"]
    cells = [_shape(row), row.problem.routing, str(ours.config or ""), _time(ours)]
    cells += [_invalid(ours) or _rate(row.gb_per_s), share(ceiling.share(row))]
    for name in rivals:
        ratio = row.ratio(name)
        cells += [_time(row.timings[name]), _invalid(row.timings[name]) or ("" if ratio is None else f"{ratio:.2f}x")]
    return cells


def _invalid(timing: Timing) -> str:
    """Why a time counts for nothing: ``wrong: 84 % of codes, 31 % of scales``."""
    return timing.reason if timing.time_us is not None else ""


def _shape(row: Row) -> str:
    layout = row.problem.input_layout
    return str(row.problem.shape) + ("" if layout == "contiguous" else f" {layout}")


def _time(timing: Timing) -> str:
    return microseconds(timing.time_us) or "-"


def _rate(gb_per_s: float | None) -> str:
    return "" if gb_per_s is None else f"{gb_per_s:,.0f}"


def _reasons(kernel: Kernel) -> list[str]:
    """Why a cell is empty: each contender's reason once, with the first shape it was given for."""
    cells = [(name, timing, _shape(row)) for row in kernel.rows for name, timing in row.timings.items()]
    cells += [("the copy", row.copy, "512 MiB") for row in kernel.rows[:1]]
    cells += [(name, timing, "a 64x64 input") for name, timing in kernel.hosts.items()]
    first: dict[tuple[str, str], str] = {}
    for name, timing, where in cells:
        if timing.time_us is None:
            first.setdefault((name, timing.reason), where)
    return [f"{name} on {where}: {reason}" for (name, reason), where in first.items()]
