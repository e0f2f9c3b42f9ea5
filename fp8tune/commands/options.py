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

DATABASE = "fp8tune.db"
"""Of this folder: what a command writes into, and reads first, unless ``--db`` says otherwise."""

COMMITTED_DATABASE = "results.db"
"""Of a checkout: read where nothing was swept yet, written only if ``--db`` names it."""

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
_DATABASE_HELP = (
    "Results database: the path of an SQLite file, or postgresql://USER@HOST/NAME (both are tested, no other is). "
    "A server's password belongs into PGPASSWORD or ~/.pgpass: others see a command line."
)
DatabaseOption = Annotated[
    str | None,
    typer.Option("--db", callback=database, help=_DATABASE_HELP, show_default=DATABASE),
]
ReadDatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--db",
        callback=database,
        help=_DATABASE_HELP,
        show_default=f"{DATABASE} where there is one, else {COMMITTED_DATABASE}",
    ),
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


def database_to_write(db: str | None) -> str:
    """What ``--db`` names, else the default one. Raises UsageError if git tracks that: the next pull would conflict."""
    if db is not None:
        return db
    from fp8tune.render import terminal as render
    from fp8tune.revisions import git

    if git.tracks(Path(DATABASE)):
        raise UsageError(f"git tracks {DATABASE}: write into it with --db {DATABASE}, or into another with --db PATH")
    if Path(COMMITTED_DATABASE).exists() and not Path(DATABASE).exists():
        render.notice(f"rows go into {DATABASE}; {COMMITTED_DATABASE} stays as it is unless --db names it")
    return DATABASE


def database_to_read(db: str | None) -> str:
    """What ``--db`` names, else the default one if it is there, else the committed one; says which where both are."""
    own, committed = Path(DATABASE).exists(), Path(COMMITTED_DATABASE).exists()
    if db is None and own and committed:
        from fp8tune.render import terminal as render

        render.notice(f"rows are those of {DATABASE}; --db {COMMITTED_DATABASE} reads the committed ones")
    return db if db is not None else COMMITTED_DATABASE if committed and not own else DATABASE
