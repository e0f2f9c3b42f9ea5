"""The options of the commands: what a field takes, and how ``--help`` describes it.

A command's options are one frozen dataclass, whose annotated fields declare them:

    @dataclass(frozen=True, kw_only=True)
    class SweepOptions:
        shapes: Shapes = ("llama4",)
        again: Annotated[bool, Option("--again", "Measure anew what already has a row.")] = False

:func:`fp8tune.commands.options.as_command` makes parameters of a typer command of them. Planning and measuring import
this, so it imports no terminal library.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fp8tune.errors import UsageError
from fp8tune.records import Published

DATABASE = "$FP8TUNE_DB, else ./fp8tune.db"
"""The user's own database, as ``--help`` says it; :mod:`fp8tune.store.location` finds it."""

Function = TypeVar("Function", bound=Callable[..., Any])

LARGEST_SEED = 2**63 - 1
"""What the database and torch hold."""

LONGEST_S = 1e7
"""Sixteen weeks: a longer time is a typing error."""


class Group(enum.StrEnum):
    """The headings of ``--help``, in its order."""

    WHAT = "What"
    RIGHT = "What is right"
    WHERE = "Where"
    HOW_LONG = "How long"
    OUTPUT = "Output"


class Names(enum.StrEnum):
    """What a shell completes the values of an option with."""

    KERNEL = "kernel"
    ARCH = "arch"
    SHAPES = "shapes"
    VERDICT = "verdict"


@dataclass(frozen=True)
class Example:
    """A command line that ``--help`` ends with, and what it is for."""

    what: str
    command: str


def examples(*pairs: tuple[str, str]) -> Callable[[Function], Function]:
    """Give a command its examples, each what it is for and the command line; tests parse them."""

    def given(function: Function) -> Function:
        function.examples = tuple(Example(*pair) for pair in pairs)  # type: ignore[attr-defined]
        return function

    return given


@dataclass(frozen=True)
class Option:
    """One option. A field of type ``tuple[str, ...]`` takes it repeatedly, a ``bool`` is a flag."""

    flag: str
    """``--output``, or ``-o, --output``."""
    help: str
    shown: str = ""
    """What ``--help`` gives as the default, if it is not the field's own."""
    parse: Callable[[str | float], object] | None = None
    """The value of a text. Raises ValueError. Its name is the placeholder in ``--help``."""
    check: Callable[[Any], Any] | None = None
    """The value, checked. Raises ValueError, which names the option to the user, or UsageError, which does not."""
    group: Group = Group.WHAT
    """The heading it stands under in ``--help``."""
    placeholder: str = ""
    """What stands for its value in ``--help``; by its type, if empty."""
    completes: Names | None = None
    """What a shell completes its value with."""


@dataclass(frozen=True)
class Argument:
    """One positional argument; a ``tuple[str, ...]`` takes all."""

    help: str
    metavar: str | None = None
    completes: Names | None = None


def seconds(text: str | float) -> float:
    """A time in seconds. Raises ValueError for one that is negative, endless or no number."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= LONGEST_S:
            return float(text)
    raise ValueError(f"{text!r} is no time: give seconds, from 0 to {LONGEST_S:.0f}")


def seed(value: int) -> int:
    """A seed that can be stored. Raises ValueError."""
    if abs(value) > LARGEST_SEED:
        raise ValueError(f"{value} is too large for a seed: keep it below 2^63")
    return value


def module_path(path: Path | None) -> Path | None:
    """Check that a table may be written to a path. Raises UsageError for a folder."""
    if path is not None and (path.is_dir() or not path.name):
        raise UsageError(f"{path} is a folder: name the module to write, such as {path / 'sm_90.py'}")
    return path


def database(url: str | None) -> str | None:
    """A database that outlives the command. Raises UsageError for one without a name, which is in memory."""
    if url is not None and is_in_memory(url):
        raise UsageError(f"--db {url!r} is a database in memory, gone when the command ends: give a file")
    return url


def is_in_memory(url: str) -> bool:
    """Whether a database is gone when the command ends."""
    return url in ("", ":memory:") or url.rstrip("/") == "sqlite:" or url.endswith("/:memory:")


def database_option(shown: str, help: str = "") -> Option:
    """``--db``; ``shown`` is what it is by default."""
    help = help or "The results: an SQLite file, or postgresql://USER@HOST/NAME."
    return Option("--db", help, shown, check=database, group=Group.OUTPUT, placeholder="DATABASE")


Kernels = Annotated[
    tuple[str, ...],
    Option(
        "--kernel",
        "One of fp8tune's, or module:ATTRIBUTE or path.py:ATTRIBUTE of your own (names: fp8tune sweep -h). Repeatable.",
        "all kernels",
        placeholder="NAME",
        completes=Names.KERNEL,
    ),
]
"""Names of kernels or specs; empty: all."""

Shapes = Annotated[
    tuple[str, ...],
    Option("--shapes", "A shape set or a path.toml. Repeatable.", placeholder="SET", completes=Names.SHAPES),
]
Routing = Annotated[
    str,
    Option(
        "--routing",
        "How rows spread over groups: balanced, jagged, zipf, one-giant, empty or ragged.",
        placeholder="NAME",
    ),
]
ScaleMode = Annotated[
    str | None, Option("--scale-mode", "power-of-two or exact.", "the kernel's first", placeholder="MODE")
]
InDtype = Annotated[
    str | None,
    Option(
        "--in-dtype",
        "Only problems with inputs of this dtype, such as bfloat16.",
        "all of the kernel",
        placeholder="DTYPE",
    ),
]
Seed = Annotated[int, Option("--seed", "Seeds values and group layouts.", check=seed)]
Timer = Annotated[
    str | None,
    Option(
        "--timer",
        "simulated:SEED runs on a fake GPU, SEED.NOISE with other noise; ,gpu=NUMBER tells GPUs of one seed apart.",
        "do_bench",
        group=Group.WHERE,
    ),
]
TimeBudget = Annotated[
    float | None,
    Option(
        "--time-budget",
        "Start no new problem after this many seconds; say what was left out.",
        parse=seconds,
        group=Group.HOW_LONG,
    ),
]
Arch = Annotated[
    str | None, Option("--arch", "A GPU arch such as sm_90 or gfx942.", group=Group.WHERE, completes=Names.ARCH)
]
WrittenDatabase = Annotated[str | None, database_option(DATABASE)]
ReadDatabase = Annotated[str | None, database_option(f"{DATABASE}; over the rows that come with fp8tune")]


class TableFormat(enum.StrEnum):
    """What most commands print."""

    TABLE = "table"
    JSON = "json"


JsonOrTable = Annotated[TableFormat, Option("--format", "A table, or JSON for a program.", group=Group.OUTPUT)]


class OperationName(enum.StrEnum):
    """What the kernels are for: ``bench`` times it, ``show`` has published figures of it."""

    GROUPED_MM = "grouped-mm"
    MXFP8_GROUPED_MM = "mxfp8-grouped-mm"
    MOE_MLP = "moe-mlp"

    def covers(self, row: Published) -> bool:
        """Whether a published row is of this operation: ``grouped-mm`` is one in any recipe."""
        return self in (row.operation, f"{row.recipe}-{row.operation}")
