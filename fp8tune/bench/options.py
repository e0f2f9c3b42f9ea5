"""Options of a benchmark, parsed."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from fp8tune.errors import UsageError
from fp8tune.records import Published

AGAINST = ("torch.compile", "torchao")


class OperationName(enum.StrEnum):
    """Operation that ``bench`` times as a whole."""

    GROUPED_MM = "grouped-mm"
    MXFP8_GROUPED_MM = "mxfp8-grouped-mm"
    MOE_MLP = "moe-mlp"

    def covers(self, row: Published) -> bool:
        """Return True if a published row is of this operation: ``grouped-mm`` is one in any recipe."""
        return self in (row.operation, f"{row.recipe}-{row.operation}")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of a benchmark. Raises UsageError for those that do not go together."""

    kernels: tuple[str, ...] = ()
    op: OperationName | None = None
    shapes: tuple[str, ...] = ()
    routing: str = "jagged"
    groups: str | None = None
    """File with the rows of each group, one number per line, as a router gave them."""
    seed: int = 0
    against: tuple[str, ...] = ()
    alone: bool = False
    variants: bool = False
    """With an operation: also each step in a CUDA graph, and ours with codes kept for the backward pass."""
    timer: str | None = None
    time_budget_s: float | None = None

    def __post_init__(self) -> None:
        if self.op is not None and (self.kernels or "torch.compile" in self.against):
            raise UsageError("--op is timed as a whole, beside bf16 and torchao: leave out --kernel and torch.compile")
        if self.op is None and (self.groups is not None or self.variants):
            raise UsageError("groups and variants go with a whole operation: add --op grouped-mm")

    @property
    def rivals(self) -> tuple[str, ...]:
        """What our kernels are timed beside."""
        return () if self.alone else self.against or AGAINST
