"""The method of each pass of ``fp8_grouped_mm``, as ``show --op grouped-mm`` prints it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fp8tune.choose.passes import LAYER, Choice
from fp8tune.records import Published
from fp8tune.render import contracts
from fp8tune.render.evidence import published_tables
from fp8tune.render.report import Column, Report, left, print_report, right
from fp8tune.render.terminal import microseconds, share, slower, times
from fp8tune.stats.means import grouped
from fp8tune_kernels.catalog import METHODS


def print_operation(choices: Sequence[Choice], published: Sequence[Published], output_format: str) -> None:
    """What was chosen here, then what others published of the operation."""
    rows: list[Choice | Published] = [*choices, *published]
    print_report(rows, _fields, [*_tables(choices), *published_tables(published)], output_format)


def _fields(row: Choice | Published) -> contracts.Object:
    return contracts.published(row) if isinstance(row, Published) else contracts.choice(row)


def _tables(choices: Sequence[Choice]) -> Iterator[Report[Choice]]:
    by_device = grouped(choices, lambda choice: (choice.study.device, choice.study.problem.routing))
    for (device, routing), found in by_device.items():
        title = f"passes of grouped-mm on {device.name or device.arch} ({device.arch}), casts included, us"
        columns: list[Column[Choice]] = [
            *(right(dim, _size(dim)) for dim in LAYER),
            left("pass", lambda choice: choice.of_pass),
            left("precision", lambda choice: choice.precision),
            left("choice", lambda choice: choice.method),
            right("us", lambda choice: microseconds(choice.study.choice.time_us)),
            right("over bf16", lambda choice: times(choice.speedup)),
            *(right(name, _time(name)) for name in METHODS),
            right("next best", lambda choice: slower(choice.study.choice.ratio)),
            right("noise", lambda choice: share(choice.study.noise, 2)),
            left("verdict", lambda choice: str(choice.study.choice.verdict)),
            right("n", lambda choice: str(choice.study.choice.processes)),
        ]
        note = f"{routing} groups; over bf16: torch's bf16 GEMM takes so many times as long as the choice"
        yield Report(title, columns, found, names=len(LAYER) + 2, note=note)


def _size(dim: str) -> Callable[[Choice], str]:
    return lambda choice: str(choice.layer[dim])


def _time(method: str) -> Callable[[Choice], str]:
    return lambda choice: microseconds(choice.times_us.get(method))
