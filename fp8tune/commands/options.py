"""Options that several commands have, and the words that options take."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

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
DatabaseOption = Annotated[str, typer.Option("--db", help="Results database: a path or any SQLAlchemy URL.")]
ArchOption = Annotated[str | None, typer.Option("--arch", help="A GPU arch such as sm_90 or gfx942.")]


class TableFormat(enum.StrEnum):
    """What a command prints that has no more to choose from."""

    TABLE = "table"
    JSON = "json"
