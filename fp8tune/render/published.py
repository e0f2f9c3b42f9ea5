"""Times that others published, as ``fp8tune show --op`` prints them and ``bench --op`` beside its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fp8tune.records import Published
from fp8tune.render.terminal import microseconds, print_csv, print_json, visible
from fp8tune.render.wide import Columns, print_wide

NAMES = 2
"""The columns that tell rows of one publication apart."""


def print_published(rows: Sequence[Published], output_format: str) -> None:
    """All rows, as ``table``, ``markdown``, ``json`` or ``csv``; why a row is impossible stands below a table."""
    if output_format == "json":
        print_json([row.as_json() for row in rows])
    elif output_format == "csv":
        print_csv([_flat(row) for row in rows])
    elif rows:
        columns: Columns = [("shape", "left"), ("note", "left"), ("recipe", "left")]
        columns += [(name, "right") for name in ("bf16 fwd", "scaled fwd", "bf16 fwd+bwd", "scaled fwd+bwd")]
        columns += [("x fwd+bwd", "right"), ("source", "left"), ("device", "left"), ("as printed", "left")]
        title = "published by others, us, not measured here"
        print_wide(title, columns, [_cells(row) for row in rows], output_format, NAMES)
        for row in rows:
            if row.impossible:
                print(visible(f"- {row.shape} {row.note}: {row.impossible}, which cannot be"))


def _cells(row: Published) -> list[str]:
    times = (row.bf16_fwd_us, row.scaled_fwd_us, row.bf16_fwd_bwd_us, row.scaled_fwd_bwd_us)
    cells = [str(row.shape), row.note, row.recipe, *map(microseconds, times), f"{row.speedup:.2f}x"]
    return [*cells, row.source, row.device.name, "impossible" if row.impossible else ""]


def _flat(row: Published) -> Mapping[str, object]:
    """The columns of the CSV that ``fp8tune import`` reads, and what follows from them."""
    return {name: value for name, value in row.as_json().items() if name not in ("row", "operation")}
