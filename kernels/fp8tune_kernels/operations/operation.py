"""Interface between an operation and ``fp8tune bench``. Imports neither torch nor Triton.

An operation of another package registers in the entry-point group ``fp8tune.operations``, as ``module:ATTRIBUTE``.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ..spec import NamedInts, Problem

LEAST_SQNR_DB = 20.0
"""Signal-to-noise ratio of a right result. FP8 and MXFP8 give about 28 dB on normal values, bfloat16 over 45."""

_SLICES = 64
_SLICE_ROWS = 64  # in fewer, chance brings some below the ratio


class Unavailable(Exception):  # noqa: N818 - an answer, which tables print
    """Raised by a contender that is not installed, or cannot take the inputs."""


def import_from(module: str, name: str) -> Any:
    """Import a name of another package. Raises Unavailable."""
    package = module.partition(".")[0]
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        reason = "is not installed" if error.name == package else f"cannot be imported: {error}"
        raise Unavailable(f"{package} {reason}") from None
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"{package} cannot be imported: {error}") from None


@dataclass(frozen=True)
class Size(Problem):
    """One problem size with its name in the shape set."""

    label: str = ""  # such as "Mixtral-8x7B down"
    groups: tuple[int, ...] = ()  # rows of each group, if a file lists them


@dataclass(frozen=True)
class Call:
    """A contender that is ready to run on some inputs.

    Its step is the forward pass, then the gradients of ``leaves`` from the output's ``grad``; without leaves it is the
    forward pass alone.
    """

    forward: Callable[[], Any]
    leaves: tuple[Any, ...] = ()
    grad: Any = None
    read: Callable[[Any], tuple[Any, ...]] = tuple  # result of a step -> outputs as the reference has them
    reference: Callable[[], tuple[Any, ...]] | None = None  # if the expected outputs depend on the contender

    def step(self) -> Any:
        """Run the step."""
        import torch

        out = self.forward()
        return (out, *torch.autograd.grad(out, self.leaves, self.grad)) if self.leaves else out


Make = Callable[[Any], Call]
"""Inputs -> a contender. Raises :class:`Unavailable`."""


@dataclass(frozen=True)
class Operation:
    """One operation and everything that computes it."""

    name: str
    title: str  # such as "FP8 grouped GEMM, forward and backward"
    sizes: Callable[
        [Mapping[str, int], str], Iterator[tuple[NamedInts, str]]
    ]  # row of a shape set, its name -> sizes, names
    inputs: Callable[[Size, str], Any]  # (size, torch device) -> seeded random operands
    reference: Callable[[Any], tuple[Any, ...]]  # inputs -> results in float32
    results: tuple[str, ...]  # names of the results
    ours: Mapping[str, Make]  # contenders of this package; ratios are of the first
    baseline: Mapping[str, Make]  # what everybody has; timed unless only ours are
    rivals: Mapping[str, Make]  # by the package's name
    flops: Callable[[Mapping[str, int]], int]
    bytes_moved: Callable[[Mapping[str, int]], int]  # the least that a step moves, roughly
    native_arches: tuple[str, ...] | None = None  # arches that have its GEMM in hardware; None: all
    routed: bool = True  # False if its sizes have no groups of rows
    shapes: str = "grouped-mm"  # shape set that is timed unless another is named

    @property
    def contenders(self) -> dict[str, Make]:
        """Return everything that computes the operation."""
        return {**self.ours, **self.baseline, **self.rivals}

    def is_emulated(self, arch: str) -> bool:
        """Return True if times on an arch say nothing about the recipe's speed in hardware."""
        return self.native_arches is not None and arch not in self.native_arches

    def bytes_of(self, size: Size) -> int:
        """Return the least bytes that a step moves."""
        return self.bytes_moved(size.shape)

    def checked_on(self, size: Size, inputs: Any) -> AbstractContextManager[None]:
        """Change inputs for the time of a check, if values must be special to be compared."""
        return nullcontext()

    def compare(self, outputs: tuple[Any, ...], expected: tuple[Any, ...]) -> tuple[str, dict[str, float]]:
        """Return the fault, or an empty text, and the signal-to-noise ratio of each result in dB.

        The worst expert of weight gradients and the worst slice of rows count, because a missing group would hardly
        change the whole. Slices without a signal, such as those of experts without rows, are not compared.
        """
        ratios = {
            name: min(_ratios_db(output, right), default=math.inf)
            for name, output, right in zip(self.results, outputs, expected, strict=True)
        }
        name, least = min(ratios.items(), key=lambda item: item[1])
        fault = f"{name} is wrong: {least:.1f} dB, at least {LEAST_SQNR_DB:.0f} dB expected"
        return "" if least >= LEAST_SQNR_DB else fault, ratios


def _ratios_db(output: Any, right: Any) -> list[float]:
    import torch

    if output.shape != right.shape:
        return [-math.inf]
    slices = len(right) if right.ndim == 3 else max(1, min(_SLICES, len(right) // _SLICE_ROWS))
    pairs = zip(output.detach().chunk(slices), right.chunk(slices), strict=True)
    signal, noise = torch.stack(
        [torch.stack([x.square().sum(dtype=torch.float64) for x in (b, a.float() - b)]) for a, b in pairs]
    ).T.tolist()
    return [_db(s, n) for s, n in zip(signal, noise, strict=True) if s]


def _db(signal: float, noise: float) -> float:
    if math.isnan(noise):
        return -math.inf
    return 10 * math.log10(signal / noise) if noise else math.inf
