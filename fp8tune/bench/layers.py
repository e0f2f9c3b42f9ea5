"""What ``fp8tune bench --op`` times: the layers of shape sets, on a seeded or a given routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from fp8tune.bench.operation import SHAPES, Operation
from fp8tune.bench.options import BenchOptions
from fp8tune.errors import UsageError
from fp8tune.plan import shapes
from fp8tune.plan.shapes import LARGEST_DIM
from fp8tune.records import NamedInts, Problem
from fp8tune_kernels.groups import group_ends
from fp8tune_kernels.spec import ROUTINGS

GIVEN = "given"
"""The routing of a layer whose group sizes were given."""


@dataclass(frozen=True)
class Layer(Problem):
    """A grouped GEMM's problem with what only this benchmark knows of it."""

    label: str = ""
    """What a shape file calls it, such as ``Mixtral-8x7B down``."""
    sizes: tuple[int, ...] = ()
    """Rows of each group, where they were given."""

    @property
    def ends(self) -> list[int]:
        """The end row of each group."""
        return list(accumulate(self.sizes)) or group_ends(self.routing, self.shape["M"], self.shape["G"], self.seed)

    @property
    def group_sizes(self) -> list[int]:
        """Rows of each group."""
        ends = self.ends
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def layers_of(options: BenchOptions, operation: Operation) -> tuple[Layer, ...]:
    """Raises UsageError for options that name nothing to time."""
    if options.routing not in ROUTINGS:
        raise UsageError(f"unknown routing {options.routing!r}: use one of {', '.join(ROUTINGS)}")
    sets = [shapes.load(name) for name in options.shapes or (SHAPES,)]
    named: dict[NamedInts, str] = {}
    for each in sets:
        for row in each.rows:
            if {"M", "N", "K", "E"} <= set(row):
                named[row] = named.get(row) or each.names.get(row, "")
    if not named:
        names = ", ".join(each.name for each in sets)
        raise UsageError(f"no row of {names} has all of M, K, N and E: a grouped GEMM needs them")
    if odd := [row for row in named if row["N"] % operation.multiple or row["K"] % operation.multiple]:
        raise UsageError(f"{odd[0]}: {operation.name} wants K and N to be multiples of {operation.multiple}")
    sizes = () if options.groups is None else group_sizes(Path(options.groups))
    layers: dict[NamedInts, Layer] = {}
    for row, label in named.items():
        if sizes and len(sizes) != row["E"]:
            continue
        shape = operation.shape_of({**row, "M": sum(sizes) or row["M"]}, label)
        if shape is None:
            continue
        routing = GIVEN if sizes else options.routing
        layers.setdefault(shape, Layer(operation.name, shape, routing, seed=options.seed, label=label, sizes=sizes))
    if not layers and not sizes:
        raise UsageError(f"no row is a layer of {operation.name}: name one 'down', or none")
    if not layers:
        raise UsageError(f"{options.groups!r} has {len(sizes)} groups, and no row of {_experts(named)} experts fits")
    return tuple(layers.values())


def _experts(rows: Mapping[NamedInts, str]) -> str:
    return " or ".join(str(count) for count in sorted({row["E"] for row in rows}))


def group_sizes(path: Path) -> tuple[int, ...]:
    """Rows of each group as a file has them: numbers with blanks, commas or line ends between, or a JSON list.

    Raises UsageError for a file that cannot be read, another text, or no row at all.
    """
    try:
        words = path.read_text(encoding="utf-8").strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    except OSError as error:
        raise UsageError(f"cannot read group sizes {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"group sizes {str(path)!r} are no text: give a row count a line") from None
    if wrong := [word for word in words if not (word.isascii() and word.isdigit() and len(word) <= 10)]:
        raise UsageError(f"group sizes {str(path)!r}: {wrong[0]!r:.40} is no row count: give a whole number a line")
    sizes = tuple(map(int, words))
    if not 1 <= sum(sizes) <= LARGEST_DIM:
        raise UsageError(f"group sizes {str(path)!r} add up to {sum(sizes)} rows: give 1 to {LARGEST_DIM}")
    return sizes
