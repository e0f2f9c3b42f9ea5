"""The options of ``fp8tune sweep`` and ``lint``. Imports no torch: ``--help`` loads this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fp8tune.errors import UsageError
from fp8tune.options import (
    Argument,
    Kernels,
    Option,
    Routing,
    ScaleMode,
    Seed,
    Shapes,
    TableFormat,
    TimeBudget,
    Timer,
    database_option,
    seconds,
)
from fp8tune_kernels.catalog import KERNELS


def at_least_a_second(timeout_s: float | None) -> float | None:
    """A time that a trial can be given. Raises UsageError."""
    if timeout_s is not None and timeout_s < 1:
        raise UsageError(f"--trial-timeout {timeout_s:g} ends trials before they begin: give at least 1 second")
    return timeout_s


@dataclass(frozen=True)
class Options:
    """What a sweep is asked for."""

    kernels: Kernels = ()
    shapes: Shapes = ("llama4",)
    routing: Routing = "jagged"
    grid: Annotated[
        tuple[str, ...], Option("--grid", "Narrow or widen an axis: num_warps=4,8. Repeatable.", "the kernel's")
    ] = ()
    arch: Annotated[str | None, Option("--arch", "Compile for an arch that is not here: static facts, no timings.")] = (
        None
    )
    static: Annotated[bool, Option("--static", "Compile only, also where --arch is this machine's.")] = False
    scale_mode: ScaleMode = None
    seed: Seed = 0
    timer: Timer = None
    again: Annotated[bool, Option("--again", "Measure anew what already has a row.")] = False
    retry_failed: Annotated[bool, Option("--retry-failed", "Try configs again that failed before.")] = False
    quick: Annotated[bool, Option("--quick", "The screen alone; without it finals in fresh processes.")] = False
    time_budget_s: TimeBudget = None
    trial_timeout_s: Annotated[
        float | None,
        Option(
            "--trial-timeout",
            "Seconds after which a trial counts as hanging, at least 1.",
            "120.0",
            parse=seconds,
            check=at_least_a_second,
        ),
    ] = None
    command: str = ""
    """The command line, kept with the sweep."""

    @property
    def references(self) -> tuple[str, ...]:
        """The kernels named, or all."""
        return self.kernels or tuple(KERNELS)


@dataclass(frozen=True, kw_only=True)
class LintOptions:
    """The options of ``lint``."""

    kernel: Annotated[str, Argument("A kernel, as for sweep --kernel.")]
    shapes: Shapes = ("starting-line",)
    routing: Annotated[str, Option("--routing", "How rows spread over groups where the pick is made.")] = "jagged"
    grid: Annotated[
        tuple[str, ...],
        Option("--grid", "Narrow an axis, and so the time it takes: num_stages=1. Repeatable.", "the kernel's"),
    ] = ()
    seed: Seed = 0
    timer: Timer = None
    time_budget_s: Annotated[
        float | None,
        Option("--time-budget", "Screen no new problem after this many seconds; say what was left out.", parse=seconds),
    ] = None
    db: Annotated[str | None, database_option("a temporary one", "Keep the rows there, and continue from them.")] = None
    format: Annotated[TableFormat, Option("--format", "table or json.")] = TableFormat.TABLE

    @property
    def sweep(self) -> Options:
        """What is screened."""
        return Options(
            kernels=(self.kernel,),
            shapes=self.shapes,
            routing=self.routing,
            grid=self.grid,
            seed=self.seed,
            timer=self.timer,
            quick=True,
            time_budget_s=self.time_budget_s,
            command=f"fp8tune lint {self.kernel}",
        )
