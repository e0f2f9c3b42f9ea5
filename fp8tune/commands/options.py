"""Options that several commands have, and the words that options take."""

from __future__ import annotations

import enum
from typing import Annotated, Any

import typer

from fp8tune.records import Published
from fp8tune_kernels.catalog import KERNELS

DEFAULT_DATABASE = "results.db"

KernelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--kernel",
        help=f"One of {', '.join(KERNELS)}; or module:ATTRIBUTE or path.py:ATTRIBUTE of a spec elsewhere. Repeatable.",
        show_default="all",
    ),
]
DatabaseOption = Annotated[
    str,
    typer.Option(
        "--db",
        help=(
            "Results database: the path of an SQLite file, or postgresql://USER@HOST/NAME (both are tested, no other "
            "is). A server's password belongs into PGPASSWORD or ~/.pgpass: others see a command line."
        ),
    ),
]
ArchOption = Annotated[str | None, typer.Option("--arch", help="A GPU arch such as sm_90 or gfx942.")]

SeedOption = Annotated[int, typer.Option("--seed", help="Seeds values and group layouts.")]
RoutingOption = Annotated[
    str,
    typer.Option("--routing", help="How rows spread over groups: balanced, jagged, zipf, one-giant, empty or ragged."),
]
ScaleModeOption = Annotated[
    str | None, typer.Option("--scale-mode", help="power-of-two or exact.", show_default="the kernel's first")
]
TimerOption = Annotated[
    str | None,
    typer.Option(
        "--timer", help="simulated:SEED runs on a fake GPU, SEED.NOISE with other noise.", show_default="do_bench"
    ),
]
TimeBudgetOption = Annotated[
    float | None,
    typer.Option("--time-budget", help="Start no new problem after this many seconds; say what was left out."),
]


def shapes_option(default: str) -> Any:
    """``--shapes`` of a command that takes ``default`` where it is not given."""
    return typer.Option("--shapes", help="A shape set or a path.toml. Repeatable.", show_default=default)


class TableFormat(enum.StrEnum):
    """What a command prints that has no more to choose from."""

    TABLE = "table"
    JSON = "json"


class OperationName(enum.StrEnum):
    """What the kernels are for: ``bench`` times it, ``show`` has published figures of it."""

    GROUPED_MM = "grouped-mm"
    MXFP8_GROUPED_MM = "mxfp8-grouped-mm"

    def covers(self, row: Published) -> bool:
        """Whether a published row is of this operation: ``grouped-mm`` is one in any recipe."""
        return self in (row.operation, f"{row.recipe}-{row.operation}")
