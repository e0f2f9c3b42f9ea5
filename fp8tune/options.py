"""Options of all commands, each declared once: the command line and the Python API take the same dataclasses.

A field of type ``tuple[str, ...]`` may be given repeatedly, a ``bool`` is a flag, and one without an :class:`Option` is
a positional argument. ``fp8tune.cli.adapter`` makes parameters of Typer from them; this module imports no terminal
library, because planning and the API import it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fp8tune.errors import UsageError

LONGEST_S = 1e7  # sixteen weeks: a longer budget is a typing error


@dataclass(frozen=True)
class Option:
    """Spelling and description of an option."""

    help: str
    metavar: str = ""
    """Placeholder of the value in ``--help``; empty for a flag."""
    names: str = ""
    """``-o, --output``; by default ``--`` and the field's name."""
    default: str = ""
    """Default in ``--help``, if it is not the field's."""
    parse: Callable[[str], Any] | None = None
    """Convert the text. Raises ValueError."""


def seconds(text: str) -> float:
    """Convert ``90``, ``90s``, ``10m`` or ``2h`` to seconds. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh]?)", text.strip(), re.ASCII)
    if match and (value := float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]) <= LONGEST_S:
        return value
    raise ValueError(f"{text!r:.80} is not a time of at most 2777h: write 90s, 10m or 2h")


def share(text: str) -> float:
    """Convert ``2%`` to 0.02. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?) ?%", text.strip(), re.ASCII)
    if match and float(match[1]) <= 100:
        return float(match[1]) / 100
    raise ValueError(f"{text!r:.80} is not a percentage: write 2%")


Names = tuple[str, ...]
Kernels = Annotated[Names, Option("colwise, module:name or file.py:name. Repeatable.", "NAME")]
OnlyKernels = Annotated[Names, Option("Only these kernels. Repeatable.", "NAME")]
Shapes = Annotated[Names, Option("Shape set or TOML file. Repeatable.", "SET")]
Device = Annotated[str, Option("GPU name or arch: H200, sm_90.", "TEXT")]
_BUDGET = Option("Time limit: 90s, 10m, 2h.", "TIME", names="--budget", parse=seconds)
Budget = Annotated[float | None, _BUDGET]
TenMinutes = Annotated[float, replace(_BUDGET, default="10m")]
Timer = Annotated[str | None, Option("Time a simulated GPU: simulated:SEED.", "TIMER")]
Gpus = Annotated[int | None, Option("Use N GPUs.", "N", default="all that are free")]
Database = Annotated[str | None, Option("SQLite file or postgresql:// URL.", "DB")]
SameBits = Annotated[str | None, Option("Picks with the same output bits at every value of SIZE, such as M.", "SIZE")]
TableOrJson = Annotated[Literal["table", "json"], Option("table or json.", "FORMAT")]
Report = Annotated[Literal["table", "markdown", "json"], Option("table, markdown or json.", "FORMAT")]


def _check_gpus(count: int | None) -> None:
    if count is not None and count < 1:
        raise UsageError(f"--gpus must be at least 1, got {count}: leave it out to use all that are free")


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """Options of ``fp8tune record``."""

    command: Names = ()
    kernel: Annotated[
        Names, Option("Only matching kernels, with or without an autotuner: 'my_ops:*'. Repeatable.", "PATTERN")
    ] = ()
    strict: Annotated[bool, Option("Exit 1 if a kernel tunes at run time.")] = False
    output: Annotated[str, Option("The recording.", "FILE", names="-o, --output")] = "run.json"


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of ``fp8tune tune``."""

    command: Names = ()
    kernel: OnlyKernels = ()
    budget_s: TenMinutes = 600.0
    tolerance: Annotated[str, Option("When an output is right, as for sweep.", "RULE")] = "auto"
    apply: Annotated[bool, Option("Change the source files without asking.")] = False
    output: Annotated[str | None, Option("Write the diff to FILE without asking.", "FILE", names="-o, --output")] = None
    gpus: Gpus = None
    timer: Timer = None
    db: Database = None

    def __post_init__(self) -> None:
        _check_gpus(self.gpus)


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options of ``fp8tune sweep``."""

    kernel: Kernels = ()
    shapes: Shapes = ("llama4",)
    recording: Annotated[str | None, Option("Sweep the launches that fp8tune record saw.", "FILE")] = None
    grid: Annotated[Names, Option("num_warps=4,8, or BLOCK_M*BLOCK_N<=8192. Repeatable.", "AXIS=VALUES")] = ()
    tolerance: Annotated[str, Option("exact, exact-sums, auto or RTOL,ATOL.", "RULE")] = "auto"
    reference: Annotated[str | None, Option("module:function that computes the expected outputs.", "FUNC")] = None
    strict: Annotated[bool, Option("Exit 1 if any config is wrong.")] = False
    quick: Annotated[bool, Option("Coarse pass only; picks are not confirmed.")] = False
    again: Annotated[bool, Option("Repeat configs that have a result or failed.")] = False
    same_bits: SameBits = None
    budget_s: Budget = None
    timing: Annotated[Literal["events", "graph"], Option("events, or graph: as replayed in CUDA graphs.", "KIND")] = (
        "events"
    )
    gpus: Gpus = None
    on: Annotated[Literal["ray"] | None, Option("Use the GPUs of a Ray cluster.", "ray")] = None
    arch: Annotated[str | None, Option("Compile only, for this arch: gfx942, sm_100.", "ARCH")] = None
    timer: Timer = None
    db: Database = None
    format: TableOrJson = "table"

    def __post_init__(self) -> None:
        _check_gpus(self.gpus)


@dataclass(frozen=True, kw_only=True)
class RecheckOptions:
    """Options of ``fp8tune recheck``."""

    table: str | None = None
    arch: Annotated[str | None, Option("The arch to recheck, if not this GPU's.", "ARCH")] = None
    kernel: OnlyKernels = ()
    recording: Annotated[str | None, Option("Launches of your own kernels.", "FILE")] = None
    budget_s: Budget = None
    gpus: Gpus = None
    db: Database = None
    format: Report = "table"

    def __post_init__(self) -> None:
        _check_gpus(self.gpus)


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Options of ``fp8tune show``."""

    kernel: str | None = None
    size: str | None = None
    device: Device = ""
    verdict: Annotated[Names, Option("Only this verdict (below). Repeatable.", "WORD")] = ()
    failed: Annotated[bool, Option("Configs that failed, and why.")] = False
    sort: Annotated[Literal["size", "speedup", "time", "peak"], Option("size, speedup, time or peak.", "KEY")] = "size"
    top: Annotated[int | None, Option("Only the first N rows.", "N")] = None
    wide: Annotated[bool, Option("All columns.")] = False
    db: Database = None
    format: Annotated[
        Literal["table", "markdown", "json", "csv"], Option("table, markdown, json or csv.", "FORMAT")
    ] = "table"

    def __post_init__(self) -> None:
        if self.top is not None and self.top < 1:
            raise UsageError(f"--top must be at least 1, got {self.top}: leave it out to see all rows")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of ``fp8tune export``."""

    arch: Annotated[str | None, Option("sm_90, gfx942, ... Default: the only one there is.", "ARCH")] = None
    kernel: Kernels = ()
    format: Annotated[
        str | None, Option("diff, python, triton-cache, vllm, sglang or hf.", "FORMAT", names="--for")
    ] = None
    size: Annotated[Names, Option("vllm, sglang, hf: E=8 or M=num_tokens. Repeatable.", "NAME=VALUE")] = ()
    within: Annotated[
        float | None, Option("diff: slowdown allowed for fewer configs.", "PERCENT", default="2%", parse=share)
    ] = None
    same_bits: SameBits = None
    allow_quick: Annotated[bool, Option("Also export quick picks.")] = False
    check: Annotated[bool, Option("Write nothing; exit 1 if a file is out of date.")] = False
    output: Annotated[str | None, Option("File or folder to write.", "PATH", names="-o, --output")] = None
    db: Database = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of ``fp8tune compare``."""

    revisions: str = ""
    kernel: Kernels = ()
    shapes: Annotated[
        Names, Option("Shape set or TOML file. Repeatable.", "SET", default="llama4; with --db: all")
    ] = ()
    picks: Annotated[Literal["own", "same", "retune"], Option("own (each side's), same (A's) or retune.", "WHICH")] = (
        "own"
    )
    outputs_only: Annotated[bool, Option("Time nothing; exit 0 if outputs agree.")] = False
    all: Annotated[bool, Option("Print all rows, not only changed and open ones.")] = False
    timer: Timer = None
    db: Annotated[str | None, Option("Compare what is recorded here; run nothing.", "DB")] = None
    format: Annotated[
        Literal["table", "markdown", "json", "html"], Option("table, markdown, json or html.", "FORMAT")
    ] = "table"


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of ``fp8tune report``."""

    kernel: Kernels = ()
    device: Device = ""
    output: Annotated[str, Option("HTML file, or FOLDER/ of SVGs.", "PATH", names="-o, --output")] = "report.html"
    db: Database = None


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of ``fp8tune doctor``."""

    kernel: str | None = None
    configs: Annotated[str | None, Option("Check tuned files of vLLM, SGLang or HF kernels.", "FOLDER")] = None
    budget_s: TenMinutes = 600.0
    db: Database = None
    format: TableOrJson = "table"


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options of ``fp8tune db import``."""

    paths: Names = ()
    kernel: Annotated[str, Option("The kernel, where a file does not name it.", "NAME")] = ""
    device: Annotated[str, Option("The GPU, where a file does not name it.", "TEXT")] = ""
    db: Database = None


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """Options of ``fp8tune db prune``."""

    archive: Annotated[str | None, Option("First write everything here, compressed.", "FILE")] = None
    db: Database = None


@dataclass(frozen=True, kw_only=True)
class ForgetOptions:
    """Options of ``fp8tune db forget``."""

    targets: Names = ()
    yes: Annotated[bool, Option("Do not ask.")] = False
    db: Database = None
