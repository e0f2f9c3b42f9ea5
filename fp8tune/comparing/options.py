"""Options of a live comparison, parsed."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path


class Configs(enum.StrEnum):
    """Which config each side launches."""

    OWN = "own"
    """What its own exported table says, else its default: what its users get."""
    SAME = "same"
    """What the first side's table says, on both: isolates the kernel's code."""
    RETUNE = "retune"
    """The fastest of each side's own grid, found anew with an equal budget."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of a live comparison."""

    revisions: str
    kernels: tuple[str, ...] = ()
    repository: Path = Path(".")
    shapes: tuple[str, ...] = ("llama4",)
    routing: str = "jagged"
    scale_mode: str | None = None
    seed: int = 0
    configs: Configs = Configs.OWN
    blind: bool = False
    timer: str | None = None
