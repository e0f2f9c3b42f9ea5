"""The options of ``fp8tune bench``."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated

from fp8tune.errors import UsageError
from fp8tune.options import Group, Kernels, Names, OperationName, Option, Routing, Seed, TimeBudget, Timer

AGAINST = ("torch.compile", "torchao")


class OutputFormat(enum.StrEnum):
    """What ``bench`` prints."""

    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of ``bench``. Raises UsageError for those that do not go together."""

    kernels: Kernels = ()
    op: Annotated[
        OperationName | None,
        Option(
            "--op",
            "grouped-mm or mxfp8-grouped-mm: a whole grouped GEMM, forward and backward, instead of single kernels; or "
            "moe-mlp: the MLP of all experts.",
            placeholder="NAME",
        ),
    ] = None
    shapes: Annotated[
        tuple[str, ...],
        Option(
            "--shapes",
            "A shape set or a path.toml. Repeatable.",
            "starting-line, or grouped-mm",
            placeholder="SET",
            completes=Names.SHAPES,
        ),
    ] = ()
    routing: Routing = "jagged"
    groups: Annotated[
        str | None,
        Option(
            "--groups",
            "With --op: a file with the rows of each group, a number a line, as a router gave them. Rows of the shape "
            "sets with as many experts are timed, M being their sum; --routing is not looked at.",
            placeholder="FILE",
        ),
    ] = None
    seed: Seed = 0
    against: Annotated[
        tuple[str, ...], Option("--against", "torch.compile or torchao. Repeatable.", "both", placeholder="NAME")
    ] = ()
    alone: Annotated[bool, Option("--alone", "Only our kernels and the ceiling; with --op no torchao.")] = False
    variants: Annotated[
        bool,
        Option(
            "--variants", "With --op: also each step in a CUDA graph, and ours with codes kept for the backward pass."
        ),
    ] = False
    timer: Timer = None
    time_budget_s: TimeBudget = None
    format: Annotated[OutputFormat, Option("--format", "table, markdown or json.", group=Group.OUTPUT)] = (
        OutputFormat.TABLE
    )

    def __post_init__(self) -> None:
        if self.op is not None and (self.kernels or "torch.compile" in self.against):
            raise UsageError("--op is timed as a whole, beside bf16 and torchao: leave out --kernel and torch.compile")
        if self.op is None and (self.groups is not None or self.variants):
            raise UsageError("--groups and --variants go with a whole operation: add --op grouped-mm")

    @property
    def rivals(self) -> tuple[str, ...]:
        """What our kernels are timed beside."""
        return () if self.alone else self.against or AGAINST
