"""The options of ``fp8tune compare``. Imports no torch: ``--help`` loads this."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fp8tune.options import Argument, Group, Kernels, Option, ReadDatabase, Routing, ScaleMode, Seed, Shapes, Timer


class Configs(enum.StrEnum):
    """Which config each side launches."""

    OWN = "own"
    """What its own exported table says, else its default: what its users get."""
    SAME = "same"
    """What the first side's table says, on both: isolates the kernel's code."""
    RETUNE = "retune"
    """The fastest of each side's own grid, found anew with an equal budget."""


class CompareFormat(enum.StrEnum):
    """What ``compare`` prints."""

    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"
    HTML = "html"


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The options of ``compare``."""

    revisions: Annotated[str, Argument("A..B, or A...B from their merge base; WORKTREE is uncommitted work.", "A..B")]
    kernels: Kernels = ()
    repository: Annotated[Path, Option("--repo", "The git repository that holds both revisions.")] = Path(".")
    shapes: Shapes = ("llama4",)
    routing: Routing = "jagged"
    scale_mode: ScaleMode = None
    seed: Seed = 0
    configs: Annotated[Configs, Option("--configs", "Each side's own table; the first side's on both; tuned anew.")] = (
        Configs.OWN
    )
    blind: Annotated[
        bool, Option("--blind", "Times identical code too: A..A shows what this machine makes of no change.")
    ] = False
    timer: Timer = None
    from_db: Annotated[bool, Option("--from-db", "Run nothing: compare recorded rows.")] = False
    db: ReadDatabase = None
    format: Annotated[CompareFormat, Option("--format", "table, markdown, json or html.", group=Group.OUTPUT)] = (
        CompareFormat.TABLE
    )
