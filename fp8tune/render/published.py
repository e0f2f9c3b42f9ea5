"""Times that others published, as ``fp8tune show --op`` prints them and ``bench --op`` beside its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8tune.records import Published
from fp8tune.render import contracts
from fp8tune.render.report import Column, Report, left, print_parts, right
from fp8tune.render.terminal import microseconds, print_csv, print_json, times


def print_published(rows: Sequence[Published], output_format: str) -> None:
    """All rows, as ``table``, ``markdown``, ``json``, or ``csv`` as ``fp8tune import`` reads it."""
    objects = [contracts.published(row) for row in rows]
    if output_format == "json":
        print_json(objects)
    elif output_format == "csv":
        print_csv([{k: value for k, value in each.items() if k not in ("row", "operation")} for each in objects])
    elif rows:
        print_parts(_parts(rows), output_format)


def _parts(rows: Sequence[Published]) -> Iterator[Report[Published] | str]:
    columns: list[Column[Published]] = [
        left("shape", lambda row: str(row.shape)),
        left("note", lambda row: row.note),
        left("recipe", lambda row: row.recipe),
        right("bf16 fwd", lambda row: microseconds(row.bf16_fwd_us)),
        right("scaled fwd", lambda row: microseconds(row.scaled_fwd_us)),
        right("bf16 fwd+bwd", lambda row: microseconds(row.bf16_fwd_bwd_us)),
        right("scaled fwd+bwd", lambda row: microseconds(row.scaled_fwd_bwd_us)),
        right("x fwd+bwd", lambda row: times(row.speedup)),
        left("source", lambda row: row.source),
        left("device", lambda row: row.device.name),
        left("as printed", lambda row: "impossible" if row.impossible else ""),
    ]
    yield Report("published by others, us, not measured here", columns, rows, names=2)
    for row in rows:
        if row.impossible:
            yield f"- {row.shape} {row.note}: {row.impossible}, which cannot be"
