"""The best config of each problem, as ``show`` and a sweep's end print it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fp8tune.records import NamedInts
from fp8tune.render.terminal import microseconds, print_csv, print_json, share
from fp8tune.render.wide import print_wide

if TYPE_CHECKING:
    from fp8tune.choose.ranking import Winner

Column = tuple[str, str, Callable[["Winner"], str]]
"""(header, ``left`` or ``right``, a row's cell)."""


def winner_json(winner: Winner) -> Mapping[str, object]:
    """One row of ``fp8tune show --format json``: the fields of a trial, and what ranking adds."""
    problem = winner.problem
    return {
        "kernel": problem.kernel,
        "arch": winner.device.arch,
        "device": winner.device.name,
        "kind": str(winner.kind),
        "shape": dict(problem.shape),
        "routing": problem.routing,
        "input_layout": problem.input_layout,
        "in_dtype": problem.in_dtype,
        "fp8_dtype": problem.fp8_dtype,
        "scale_mode": problem.scale_mode,
        "config": None if winner.config is None else dict(winner.config),
        "status": "ok",
        "time_us": winner.time_us,
        "reason": "",
        "ceiling_share": winner.ceiling_share,
        "n": winner.n,
        "source": winner.evidence.source or None,
        "verdict": winner.verdict,
        "noise_floor": winner.noise_floor,
        "runner_up": None if winner.runner_up is None else dict(winner.runner_up),
        "runner_up_us": winner.runner_up_us,
    }


def print_winners(winners: Sequence[Winner], output_format: str) -> None:
    """The best config of each problem, as a table, JSON or CSV."""
    if output_format == "json":
        print_json([winner_json(winner) for winner in winners])
        return
    if output_format == "csv":
        print_csv([winner_json(winner) for winner in winners])
        return
    by_kernel: dict[tuple[str, str], list[Winner]] = {}
    for winner in winners:
        by_kernel.setdefault((winner.problem.kernel, winner.device.name or winner.device.arch), []).append(winner)
    for (kernel, device), group in by_kernel.items():
        _print_kernel(f"{kernel} on {device} ({group[0].device.arch})", group)


def _print_kernel(title: str, winners: Sequence[Winner]) -> None:
    """One row a problem; what all rows have in common stands in the title."""
    dims = _names(winner.problem.shape for winner in winners)
    named: list[Column] = [(name, "right", _dim(name)) for name in dims]
    named += [("layout", "left", lambda winner: winner.problem.input_layout), ("routing", "left", _routing)]
    axes: list[Column] = [
        (name, "right", _axis(name)) for name in _names(winner.config for winner in winners if winner.config)
    ]
    columns = [*named, *axes, *_MEASURED]
    cells = [[cell(winner) for _, _, cell in columns] for winner in winners]
    common = {i for i, column in enumerate(zip(*cells, strict=True)) if len(cells) > 1 and len({*column}) == 1}
    common -= {i for i, (header, _, _) in enumerate(columns) if header in (*dims, *_ALWAYS)}
    said = [f"{columns[i][0]} {cells[0][i]}" for i in sorted(common) if cells[0][i] not in ("", "none", "contiguous")]
    shown = [i for i in range(len(columns)) if i not in common]
    print_wide(
        ", ".join([title, *said]),
        [columns[i][:2] for i in shown],
        [[row[i] for i in shown] for row in cells],
        "table",
        names=sum(i < len(named) for i in shown),
    )


def _names(items: Iterable[NamedInts]) -> list[str]:
    """Every name, in the order of the first that has it."""
    return list(dict.fromkeys(name for item in items for name in item))


def _dim(name: str) -> Callable[[Winner], str]:
    return lambda winner: f"{winner.problem.shape[name]}" if name in winner.problem.shape else ""


def _axis(name: str) -> Callable[[Winner], str]:
    """``128``, or ``128/64`` where the next best has another value."""

    def cell(winner: Winner) -> str:
        if winner.config is None or name not in winner.config:
            return "?" if winner.config is None else ""
        best, other = winner.config[name], winner.runner_up.get(name) if winner.runner_up else None
        return f"{best}" if other in (None, best) else f"{best}/{other}"

    return cell


def _routing(winner: Winner) -> str:
    return winner.problem.routing


def _rate(winner: Winner) -> str:
    moved = winner.evidence.bytes_moved
    return f"{moved / winner.time_us / 1e3:,.0f}" if moved and winner.time_us else ""


def _origin(winner: Winner) -> str:
    unfinished = "" if winner.evidence.complete else " (unfinished)"
    return (winner.evidence.source or str(winner.kind)) + unfinished


_MEASURED: Sequence[Column] = (
    ("us", "right", lambda winner: microseconds(winner.time_us)),
    ("GB/s", "right", _rate),
    ("of ceiling", "right", lambda winner: share(winner.ceiling_share)),
    ("next best", "right", lambda winner: "" if winner.ratio is None else f"{100 * (winner.ratio - 1):+.1f} %"),
    ("noise", "right", lambda winner: "" if winner.noise_floor is None else f"{100 * winner.noise_floor:.2f} %"),
    ("verdict", "left", lambda winner: str(winner.verdict or "")),
    ("n", "right", lambda winner: str(winner.n)),
    ("from", "left", _origin),
)
_ALWAYS = ("us", "GB/s", "of ceiling", "next best")
