"""The best config of each problem, as ``show`` and a sweep's end print it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from fp8tune.ceiling import Bound, ceiling_of
from fp8tune.records import NamedInts, is_recorded
from fp8tune.render import contracts, legend
from fp8tune.render.report import Column, Report, left, print_report, right
from fp8tune.render.terminal import AT_MOST, checked, layout_name, microseconds, rate, share, slower
from fp8tune.stats.means import group_by
from fp8tune.stats.study import Study, Verdict

ALWAYS = ("us", "GB/s", "of ceiling", "next best")
"""Columns that stay also where all rows have the same."""

OF_NEXT_BEST = "next best has"
"""A column that stays where a row has any, and where there is room for it: ``explain`` has it too."""


def print_winners(studies: Sequence[Study], output_format: str, *, explain: bool = False) -> None:
    """The best config of each problem, as a table, markdown, JSON or CSV; ``explain``: with a legend."""
    tables = [
        _report(f"{kernel} on {name} ({arch})", found)
        for (kernel, name, arch), found in group_by(studies, _kernel_and_device).items()
    ]
    fields = contracts.winner
    if any(study.flops is not None or study.pick.check != "exact" for study in studies):
        fields = contracts.bounded_winner
    kept = {str(study.precedence) for study in studies}
    print_report(studies, fields, [*tables, *(legend.of(tables, kept) if explain and tables else [])], output_format)


def _kernel_and_device(study: Study) -> tuple[str, str, str]:
    device = study.device
    return study.problem.kernel, device.name or device.arch, device.arch


def _report(title: str, studies: Sequence[Study]) -> Report[list[str]]:
    """One row a problem; what all rows have in common stands in the title, or below that of a recorded kernel, whose
    name is long."""
    are_recorded = all(is_recorded(study.problem) for study in studies)
    dims = _names(study.problem.shape for study in studies)
    axes = _names(study.pick.config for study in studies if study.pick.config)
    columns: list[Column[Study]] = [
        *(right(name, _dim(name)) for name in dims),
        left("launch" if are_recorded else "layout", lambda study: layout_name(study.problem.input_layout)),
        left("routing", lambda study: study.problem.routing),
        *_beside(studies),
        *(right(name, _axis(name)) for name in axes),
        right("us", lambda study: microseconds(study.choice.time_us)),
        right("GB/s", _gb_per_s),
        right("of ceiling", lambda study: share(ceiling.share if (ceiling := ceiling_of(study)) else None)),
        _next_best(studies),
        right("noise", lambda study: share(study.noise, 2)),
        left("verdict", lambda study: _verdict(study)),
        right("n", lambda study: str(study.choice.processes)),
        left("from", _origin),
        left(OF_NEXT_BEST, _other),
    ]
    cells = Report("", columns, studies).cells()
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


def _verdict(study: Study) -> str:
    return "" if study.choice.verdict is Verdict.PUBLISHED else str(study.choice.verdict)


def _ratio(study: Study) -> float | None:
    return study.next_best.ratio if study.next_best else None


def _next_best(studies: Sequence[Study]) -> Column[Study]:
    """How much slower it is; where one is faster, with why it is not the pick, in the same cell: none stands alone."""
    if not any(study.precedence for study in studies):
        return right("next best", lambda study: slower(_ratio(study)))
    width = max(len(slower(_ratio(study))) for study in studies)

    def cell(study: Study) -> str:
        return f"{slower(_ratio(study)):>{width}}  {study.precedence}".rstrip()

    return left("next best", cell)


def _in_title(header: str, text: str) -> str:
    """What all rows have."""
    return {"bound": f"bound by {text}", "check": checked(text)}.get(header, f"{header} {text}")


def _beside(studies: Sequence[Study]) -> list[Column[Study]]:
    """What only some kernels have: another dtype than bfloat16, operations, a check other than of equal bytes."""
    columns: list[tuple[Column[Study], str]] = [
        (left("dtype", lambda study: study.problem.in_dtype), "bfloat16"),
        (left("bound", lambda study: str(ceiling.bound) if (ceiling := ceiling_of(study)) else ""), Bound.MEMORY),
        (left("check", lambda study: study.pick.check), "exact"),
    ]
    return [column for column, usual in columns if any(column.cell(each) not in ("", usual) for each in studies)]


def _names(items: Iterable[NamedInts]) -> list[str]:
    """Every name, in the order of the first that has it."""
    return list(dict.fromkeys(name for item in items for name in item))


def _dim(name: str) -> Callable[[Study], str]:
    return lambda study: str(study.problem.shape.get(name, ""))


def _axis(name: str) -> Callable[[Study], str]:
    return lambda study: "?" if study.pick.config is None else str(study.pick.config.get(name, ""))


def _other(study: Study) -> str:
    """Where the next best differs: ``maxnreg 168, num_warps 4``."""
    config, rival = study.pick.config, study.next_best
    if config is None or rival is None:
        return ""
    return ", ".join(f"{name} {value}" for name, value in rival.config.items() if config.get(name) != value)


def _origin(study: Study) -> str:
    return (study.pick.source or study.kind) + ("" if study.complete else " (unfinished)")


def _gb_per_s(study: Study) -> str:
    moved, time_us = study.bytes_moved, study.choice.time_us
    return rate(moved / time_us / 1e3 if moved and time_us else None)
