"""The best config of each problem, as ``show`` and a sweep's end print it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from fp8tune.ceiling import Bound
from fp8tune.choose.candidates import Winner
from fp8tune.choose.ranking import grouped
from fp8tune.records import NamedInts, is_recorded
from fp8tune.render import contracts, legend
from fp8tune.render.report import Column, Report, left, print_report, right
from fp8tune.render.terminal import AT_MOST, checked, layout_name, microseconds, rate, share, slower

ALWAYS = ("us", "GB/s", "of ceiling", "next best")
"""Columns that stay also where all rows have the same."""

OF_NEXT_BEST = "next best has"
"""A column that stays where a row has any, and where there is room for it: ``explain`` has it too."""


def print_winners(winners: Sequence[Winner], output_format: str, *, explain: bool = False) -> None:
    """The best config of each problem, as a table, markdown, JSON or CSV; ``explain``: with a legend."""
    tables = [
        _report(f"{kernel} on {name} ({arch})", found)
        for (kernel, name, arch), found in grouped(winners, _kernel_and_device).items()
    ]
    fields = contracts.winner
    if any(winner.evidence.flops is not None or winner.evidence.check != "exact" for winner in winners):
        fields = contracts.bounded_winner
    kept = {str(winner.decision.kept) for winner in winners}
    print_report(winners, fields, [*tables, *(legend.of(tables, kept) if explain and tables else [])], output_format)


def _kernel_and_device(winner: Winner) -> tuple[str, str, str]:
    device = winner.device
    return winner.problem.kernel, device.name or device.arch, device.arch


def _report(title: str, winners: Sequence[Winner]) -> Report[list[str]]:
    """One row a problem; what all rows have in common stands in the title, or below that of a recorded kernel, whose
    name is long."""
    are_recorded = all(is_recorded(winner.problem) for winner in winners)
    dims = _names(winner.problem.shape for winner in winners)
    axes = _names(winner.config for winner in winners if winner.config)
    columns: list[Column[Winner]] = [
        *(right(name, _dim(name)) for name in dims),
        left("launch" if are_recorded else "layout", lambda winner: layout_name(winner.problem.input_layout)),
        left("routing", lambda winner: winner.problem.routing),
        *_beside(winners),
        *(right(name, _axis(name)) for name in axes),
        right("us", lambda winner: microseconds(winner.time_us)),
        right("GB/s", _gb_per_s),
        right("of ceiling", lambda winner: share(winner.ceiling_share)),
        _next_best(winners),
        right("noise", lambda winner: share(winner.noise_floor, 2)),
        left("verdict", lambda winner: str(winner.verdict or "")),
        right("n", lambda winner: str(winner.n)),
        left("from", _origin),
        left(OF_NEXT_BEST, _other),
    ]
    cells = Report("", columns, winners).cells()
    shown, said = [], list[str]()
    kept_always = ALWAYS if are_recorded else (*dims, *ALWAYS)
    for i, (column, texts) in enumerate(zip(columns, zip(*cells, strict=True), strict=True)):
        if column.header == OF_NEXT_BEST:
            shown += [i] if any(texts) else []
            continue
        is_constant_dim = are_recorded and i < len(dims) and len({*texts}) == 1
        if (len(cells) == 1 and not is_constant_dim) or len({*texts}) > 1 or column.header in kept_always:
            shown.append(i)
        elif texts[0] not in ("", "none", "contiguous"):
            said.append(_in_title(column.header, texts[0]))
    if are_recorded:
        said.append(AT_MOST)
    kept = [Column[list[str]](columns[i].header, columns[i].side, itemgetter(i)) for i in shown]
    names = sum(i < len(dims) + 2 for i in shown)
    if are_recorded:
        return Report(title, kept, cells, names, note=", ".join(said), spare=frozenset({OF_NEXT_BEST}))
    return Report(", ".join([title, *said]), kept, cells, names, spare=frozenset({OF_NEXT_BEST}))


def _next_best(winners: Sequence[Winner]) -> Column[Winner]:
    """How much slower it is; where one is faster, with why it is not the pick, in the same cell: none stands alone."""
    if not any(winner.decision.kept for winner in winners):
        return right("next best", lambda winner: slower(winner.decision.ratio))
    width = max(len(slower(winner.decision.ratio)) for winner in winners)

    def cell(winner: Winner) -> str:
        return f"{slower(winner.decision.ratio):>{width}}  {winner.decision.kept}".rstrip()

    return left("next best", cell)


def _in_title(header: str, text: str) -> str:
    """What all rows have."""
    return {"bound": f"bound by {text}", "check": checked(text)}.get(header, f"{header} {text}")


def _beside(winners: Sequence[Winner]) -> list[Column[Winner]]:
    """What only some kernels have: another dtype than bfloat16, operations, a check other than of equal bytes."""
    columns: list[tuple[Column[Winner], str]] = [
        (left("dtype", lambda winner: winner.problem.in_dtype), "bfloat16"),
        (left("bound", lambda winner: str(winner.bound or "")), Bound.MEMORY),
        (left("check", lambda winner: winner.evidence.check), "exact"),
    ]
    return [column for column, usual in columns if any(column.cell(each) not in ("", usual) for each in winners)]


def _names(items: Iterable[NamedInts]) -> list[str]:
    """Every name, in the order of the first that has it."""
    return list(dict.fromkeys(name for item in items for name in item))


def _dim(name: str) -> Callable[[Winner], str]:
    return lambda winner: str(winner.problem.shape.get(name, ""))


def _axis(name: str) -> Callable[[Winner], str]:
    return lambda winner: "?" if winner.config is None else str(winner.config.get(name, ""))


def _other(winner: Winner) -> str:
    """Where the next best differs: ``maxnreg 168, num_warps 4``."""
    if winner.config is None or winner.runner_up is None:
        return ""
    return ", ".join(f"{name} {value}" for name, value in winner.runner_up.items() if winner.config.get(name) != value)


def _origin(winner: Winner) -> str:
    evidence = winner.evidence
    return (evidence.source or evidence.kind) + ("" if evidence.complete else " (unfinished)")


def _gb_per_s(winner: Winner) -> str:
    moved = winner.evidence.bytes_moved
    return rate(moved / winner.time_us / 1e3 if moved and winner.time_us else None)
