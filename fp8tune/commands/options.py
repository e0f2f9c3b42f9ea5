"""Options that several commands have, and the words that options take."""

from __future__ import annotations

import enum
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8tune.errors import UsageError
from fp8tune.records import Published
from fp8tune_kernels.catalog import KERNELS

DEFAULT_DATABASE = "results.db"

LARGEST_SEED = 2**63 - 1
"""What the database and torch hold."""

LONGEST_S = 1e7
"""A time of more than sixteen weeks is a typing error."""


def seconds(text: str | float) -> float:
    """What an option takes that is a time. Refuses one that is negative, endless or no number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= LONGEST_S:  # also false for what is no number
        raise typer.BadParameter(f"{text!r} is no time: give seconds, from 0 to {LONGEST_S:.0f}")
    return value


def seed(value: int) -> int:
    """A seed that can be stored."""
    if abs(value) > LARGEST_SEED:
        raise typer.BadParameter(f"{value} is too large for a seed: keep it below 2^63")
    return value


def module_path(path: Path | None) -> Path | None:
    """Where a table may be written. Raises UsageError for a folder, and where the JSON beside it would replace it."""
    if path is not None and (path.is_dir() or not path.name):
        raise UsageError(f"{path} is a folder: name the module to write, such as {path / 'sm_90.py'}")
    if path is not None and path.suffix == ".json":
        raise UsageError(f"{path} is where the JSON beside the module goes: name the module, {path.with_suffix('.py')}")
    return path


def database(url: str | None) -> str | None:
    """A database that outlives the command. Raises UsageError for one without a name, which is in memory."""
    if url is not None and (url in ("", ":memory:") or url.rstrip("/") == "sqlite:" or url.endswith("/:memory:")):
        raise UsageError(f"--db {url!r} is a database in memory, gone when the command ends: give a file")
    return url


KernelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--kernel",
        help=f"One of {', '.join(KERNELS)}; or module:ATTRIBUTE or path.py:ATTRIBUTE of a spec elsewhere. Repeatable.",
        show_default="all",
    ),
]
DatabaseOption = Annotated[
    str, typer.Option("--db", callback=database, help="Results database: a path or any SQLAlchemy URL.")
]
ArchOption = Annotated[str | None, typer.Option("--arch", help="A GPU arch such as sm_90 or gfx942.")]

SeedOption = Annotated[int, typer.Option("--seed", callback=seed, help="Seeds values and group layouts.")]
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
    typer.Option(
        "--time-budget", parser=seconds, help="Start no new problem after this many seconds; say what was left out."
    ),
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
