"""The options of ``fp8tune sweep``. Imports no torch: ``--help`` loads this."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated

from fp8tune.errors import UsageError
from fp8tune.options import (
    Group,
    InDtype,
    Kernels,
    Names,
    Option,
    Routing,
    ScaleMode,
    Seed,
    Shapes,
    TableFormat,
    Timer,
    WrittenDatabase,
    seconds,
)
from fp8tune.plan.shapes import list_sets
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.catalog import KERNELS

LISTS = (
    ("Kernels of fp8tune", ", ".join(KERNELS)),
    (
        "Kernels of your own",
        "module:ATTRIBUTE or path.py:ATTRIBUTE, of a spec or of an autotuned kernel, whose launches --recording or a "
        "following @RECORDING.json gives",
    ),
    ("Shape sets", ", ".join(list_sets())),
    ("GPU arches", ", ".join(ARCHES)),
    (
        "Databases",
        "an SQLite file, or a PostgreSQL server, whose password goes into PGPASSWORD or ~/.pgpass: others see a "
        "command line",
    ),
)
"""Names that options of every command take; this command's help lists them."""


class On(enum.StrEnum):
    """Where a sweep's work is done, if not by this process."""

    QUEUE = "queue"
    """By workers that are started by hand, by a shell or by a job array."""
    RAY = "ray"
    """By workers on a Ray cluster, one a GPU."""


@dataclass(frozen=True)
class Options:
    """The options of ``sweep``. Raises UsageError for a trial timeout under a second."""

    kernels: Kernels = tuple(KERNELS)
    shapes: Shapes = ("llama4",)
    routing: Routing = "jagged"
    recording: Annotated[
        str | None,
        Option(
            "--recording",
            "A file of fp8tune record: its kernels are swept, or those of --kernel, as they were launched.",
            placeholder="FILE",
        ),
    ] = None
    check: Annotated[
        str | None,
        Option(
            "--check",
            "exact, exact-inputs, tolerance or tolerance=RELATIVE,ABSOLUTE.",
            "the kernel's own",
            group=Group.RIGHT,
            placeholder="RULE",
        ),
    ] = None
    reference: Annotated[
        str | None,
        Option(
            "--reference",
            "module:function, which gives the right outputs for the kernel's arguments.",
            "the spec's own, or agreement with the config declared first",
            group=Group.RIGHT,
            placeholder="MODULE:FUNCTION",
        ),
    ] = None
    grid: Annotated[
        tuple[str, ...],
        Option("--grid", "Narrow or widen an axis: num_warps=4,8. Repeatable.", placeholder="AXIS=VALUES"),
    ] = ()
    arch: Annotated[
        str | None,
        Option(
            "--arch",
            "Compile for an arch that is not here: static facts, no timings.",
            group=Group.WHERE,
            completes=Names.ARCH,
        ),
    ] = None
    static: Annotated[
        bool, Option("--static", "Compile only, also where --arch is this machine's.", group=Group.WHERE)
    ] = False
    on: Annotated[
        On | None,
        Option(
            "--on",
            "queue: leave it to fp8tune worker. ray: every GPU of this machine, or of the cluster at RAY_ADDRESS.",
            "this process, one GPU",
            group=Group.WHERE,
        ),
    ] = None
    scale_mode: ScaleMode = None
    in_dtype: InDtype = None
    seed: Seed = 0
    timer: Timer = None
    again: Annotated[bool, Option("--again", "Measure anew what already has a row.", group=Group.HOW_LONG)] = False
    retry_failed: Annotated[
        bool, Option("--retry-failed", "Try configs again that failed before.", group=Group.HOW_LONG)
    ] = False
    quick: Annotated[
        bool, Option("--quick", "The screen alone; without it finals in fresh processes.", group=Group.HOW_LONG)
    ] = False
    time_budget_s: Annotated[
        float | None,
        Option(
            "--time-budget",
            "Stop after this many seconds and say what was left out; the same command goes on later.",
            parse=seconds,
            group=Group.HOW_LONG,
        ),
    ] = None
    trial_timeout_s: Annotated[
        float,
        Option(
            "--trial-timeout",
            "Seconds after which a trial counts as hanging, at least 1.",
            parse=seconds,
            group=Group.HOW_LONG,
        ),
    ] = 120.0
    db: WrittenDatabase = None
    format: Annotated[
        TableFormat,
        Option("--format", "table, or json: one object a line, one a trial, as they come.", group=Group.OUTPUT),
    ] = TableFormat.TABLE
    command: str = ""
    """The command line that is kept with the rows."""

    @property
    def json(self) -> bool:
        """Whether trials are printed as they come, and no table."""
        return self.format is TableFormat.JSON

    def __post_init__(self) -> None:
        if self.trial_timeout_s < 1:
            raise UsageError(
                f"--trial-timeout {self.trial_timeout_s:g} ends trials before they begin: give at least 1 second"
            )
