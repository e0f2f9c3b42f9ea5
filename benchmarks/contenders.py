"""Contenders for one computation: checked against a reference, then timed in turn in one process."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.tables import table
from fp8tune.measure.timing import block
from fp8tune.stats.means import geomean

ROUNDS = 3  # about one block in a thousand takes several times as long as the others
OURS = "fp8tune"
LONGEST = 80  # characters of a reason


class Unavailable(Exception):  # noqa: N818 - an answer, which tables print
    """Raised by a contender that is not installed, or cannot take the inputs."""


def import_from(module: str, name: str) -> Any:
    """Import a name of another package. Raises Unavailable."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"{error}") from None


@dataclass(frozen=True)
class Call:
    """A contender that is ready to run: forward, then the gradients of ``leaves`` if it has any."""

    forward: Callable[[], Any]
    leaves: tuple[Any, ...] = ()
    grad: Any = None
    read: Callable[[Any], tuple[Any, ...]] = tuple  # result of a step -> outputs as the reference has them
    reference: Callable[[], tuple[Any, ...]] | None = None  # if the expected outputs depend on the contender

    def step(self) -> Any:
        """Run the step."""
        out = self.forward()
        return (out, *torch.autograd.grad(out, self.leaves, self.grad)) if self.leaves else out


@dataclass
class Cell:
    """Findings about one contender on one size."""

    problem: str = ""  # why it has no time
    time_us: float | None = None
    peak_mib: float | None = None

    def text(self, ours: Cell) -> str:
        """Return the time over that of ours, or why there is none."""
        if self.problem or not (self.time_us and ours.time_us):
            return self.problem or "right"
        return f"{self.time_us / ours.time_us:.2f}x"


def measured(
    contenders: Mapping[str, Callable[[], Call]],
    reference: Callable[[], tuple[Any, ...]],
    fault: Callable[[tuple[Any, ...], tuple[Any, ...]], str],
    values: AbstractContextManager[None] = nullcontext(),
) -> dict[str, Cell]:
    """Check all contenders, then time those that are right. Without a GPU nothing is timed.

    ``fault(outputs, expected)`` says what is wrong, or nothing. ``values`` changes the inputs during checks.
    """
    cells, calls = {name: Cell() for name in contenders}, dict[str, Call]()
    with values:
        expected = reference()
        for name, make in contenders.items():
            try:
                call = make()
                right = call.reference() if call.reference else expected
                cells[name].problem = fault(call.read(call.step()), right)
                calls[name] = call
            except (Unavailable, RuntimeError, ValueError) as error:
                cells[name].problem = (str(error).splitlines() or [type(error).__name__])[0][:LONGEST]
    del expected
    timed = {name: call for name, call in calls.items() if not cells[name].problem and torch.cuda.is_available()}
    blocks: dict[str, list[float]] = {name: [] for name in timed}
    for name, call in timed.items():
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call.step()
        cells[name].peak_mib = (torch.cuda.max_memory_allocated() - before) / 2**20
    for first in range(ROUNDS):
        names = [*timed]
        for name in names[first % len(names) :] + names[: first % len(names)] if names else []:
            blocks[name].append(block(timed[name].step).time_us or math.nan)
    for name, times_us in blocks.items():
        cells[name].time_us = statistics.median(times_us)
    return cells


def report(title: str, rows: Sequence[tuple[str, Mapping[str, Cell]]]) -> int:
    """Print a table in Markdown: times over ours, and their geometric means. Return 1 if ours is wrong somewhere."""
    names = list(rows[0][1])
    lines = [
        (
            size,
            *(cells[name].text(cells[OURS]) for name in names[1:]),
            cells[OURS].problem or (f"{cells[OURS].time_us:.1f}" if cells[OURS].time_us else "right"),
            f"{cells[OURS].peak_mib:,.0f}" if cells[OURS].peak_mib is not None else "",
        )
        for size, cells in rows
    ]
    means = []
    for name in names[1:]:
        pairs = [(cells[name].time_us, cells[OURS].time_us) for _, cells in rows]
        ratios = [theirs / ours for theirs, ours in pairs if theirs and ours]
        means.append(f"{geomean(ratios):.2f}x on {len(ratios)}" if ratios else "")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: outputs are compared only"
    print(f"{title} ({gpu}, torch {torch.__version__})\n")
    print(table(["size", *names[1:], "us", "MiB"], [*lines, ("mean", *means, "", "")], "---:"))
    return int(any(cells[OURS].problem for _, cells in rows))
