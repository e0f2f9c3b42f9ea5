"""A recorded launch at smaller sizes that no block divides: what a dropped tail or a missing mask needs to show.

Each size of a tensor becomes another one, everywhere it occurs: in shapes, strides, scalars, integer values and the
grid. A size that 16 divides stays so (16 times an odd number), any other becomes a prime, so that the same code is
compiled. Nothing is guessed: where a number has two meanings or none, there are no other sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fp8tune.autotuned.problems import tensors_of
from fp8tune.recording import Argument, Grid, Kernel, Launch, Scalar, Tensor, Value

KEPT = 16
"""Sizes up to this stay: groups, heads, blocks of a scale."""

MULTIPLES_OF_16 = (208, 176, 144, 112, 240, 272, 80, 48, 304, 16)
PRIMES = (157, 101, 67, 131, 83, 113, 59, 43, 31, 23, 17)


class UnclearError(Exception):
    """A number whose meaning cannot be told; the text says which."""


def odd(kernel: Kernel, launch: Launch) -> Launch | str:
    """The launch at other sizes, or why there is none."""
    try:
        sizes = _substituted(launch)
        if not sizes:
            return "it has no size above 16"
        numbers = _Numbers(launch, sizes)
        arguments = tuple(_argument(argument, numbers) for argument in launch.arguments)
        return replace(launch, arguments=arguments, grid=_grid(launch.grid, numbers))
    except UnclearError as unclear:
        return str(unclear)


def _substituted(launch: Launch) -> dict[int, int]:
    """Size -> the one that takes its place."""
    found = sorted({size for tensor in tensors_of(launch) for size in tensor.shape if size > KEPT}, reverse=True)
    taken: dict[int, int] = {}
    for size in found:
        choices = MULTIPLES_OF_16 if size % 16 == 0 else PRIMES
        free = [choice for choice in choices if choice < size and choice not in taken.values()]
        if free:
            taken[size] = free[0]
    return taken


class _Numbers:
    """What a number of the launch becomes."""

    def __init__(self, launch: Launch, sizes: Mapping[int, int]) -> None:
        self.sizes = sizes
        self.names = {argument.name for argument in launch.arguments}
        self.meanings: dict[int, set[int]] = {}
        self.strides: dict[int, set[int]] = {}
        for tensor in tensors_of(launch):
            for size in tensor.shape:
                self._mean(size, self.size(size))
            for count in range(2, len(tensor.shape) + 1):
                for dims in (tensor.shape[:count], tensor.shape[-count:]):
                    self._mean(math.prod(dims), math.prod(map(self.size, dims)))
            for stride, new in zip(tensor.strides, self.new_strides(tensor), strict=True):
                self.strides.setdefault(stride, set()).add(new)

    def _mean(self, number: int, new: int) -> None:
        self.meanings.setdefault(number, set()).add(new)

    def size(self, size: int) -> int:
        return self.sizes.get(size, size)

    def new_strides(self, tensor: Tensor) -> tuple[int, ...]:
        """Of a dense tensor in any order of its dims. Raises UnclearError for any other."""
        made, old, new = [0] * len(tensor.shape), 1, 1
        for dim in sorted(range(len(tensor.shape)), key=lambda dim: (tensor.strides[dim], tensor.shape[dim])):
            stride, size = tensor.strides[dim], tensor.shape[dim]
            if stride == 0:
                continue
            if size == 1:
                made[dim] = next(iter(self.strides.get(stride, ())), self.size(stride))
                continue
            if stride != old:
                raise UnclearError(f"{tensor.name} has gaps between its elements")
            made[dim], old, new = new, old * size, new * self.size(size)
        return tuple(made)

    def is_block(self, name: str) -> bool:
        """Whether a constant is one of blocks by its name: ``BLOCK_N``, or ``BD`` beside an argument ``D``."""
        return "BLOCK" in name.upper() or (name.startswith("B") and name[1:] in self.names)

    def scalar(self, scalar: Scalar) -> int:
        """Raises UnclearError for a number with more than one meaning, or none."""
        value = scalar.value
        both = (self.strides, self.meanings) if "stride" in scalar.name.lower() else (self.meanings, self.strides)
        found = next((known[value] for known in both if value in known), None)
        if found is None:
            if value <= KEPT or scalar.is_constexpr:
                return int(value)
            raise UnclearError(f"{scalar.name}={value} is no size of a tensor")
        if len(found) > 1:
            raise UnclearError(f"{scalar.name}={value} may be several sizes")
        return next(iter(found))


def _argument(argument: Argument, numbers: _Numbers) -> Argument:
    if isinstance(argument, Scalar):
        if type(argument.value) is not int or (argument.is_constexpr and numbers.is_block(argument.name)):
            return argument
        return replace(argument, value=numbers.scalar(argument))
    shape = tuple(map(numbers.size, argument.shape))
    if argument.offset and shape != argument.shape:
        raise UnclearError(f"{argument.name} begins inside another tensor")
    made = replace(argument, shape=shape, strides=numbers.new_strides(argument))
    is_integer = not argument.dtype.startswith(("float", "bfloat", "complex", "bool"))
    return _integers(made, argument, numbers) if is_integer else made


def _integers(made: Tensor, recorded: Tensor, numbers: _Numbers) -> Tensor:
    """Values up to a size, as group ends are, scaled as the size is. Raises UnclearError for other large ones."""
    values = recorded.values
    least, most = (min(values), max(values)) if values else (recorded.least, recorded.most)
    if values is not None and made.shape != recorded.shape:
        count, kept = math.prod(made.shape), len(values)
        values = tuple(values[index * kept // count] for index in range(count))
    if most is None or most <= KEPT:
        return replace(made, values=values)
    old = next((size for size in numbers.sizes if size in (most, most + 1)), None)
    if old is None:
        raise UnclearError(f"{recorded.name} holds values up to {int(most)}, which is no size of a tensor")
    new = numbers.sizes[old]
    largest = new if most == old else new - 1

    def scaled(value: float) -> int:
        return min(int(value) * new // old, largest)

    return replace(
        made,
        values=None if values is None else tuple(map(scaled, values)),
        least=None if least is None else float(scaled(least)),
        most=float(largest),
    )


Terms = Mapping[tuple[int, ...], tuple[int, ...]]
"""What one entry of the table gives for each way to count programs -> the same at the new sizes."""


def _grid(grid: Grid, numbers: _Numbers) -> Grid:
    """The grid at the new sizes. Raises UnclearError unless one formula alone explains every entry."""
    count = max((len(programs) for _, programs in grid.table), default=0)
    if any(len(programs) != count for _, programs in grid.table):
        raise UnclearError("its grid has not always as many dimensions")
    columns = []
    for dim in range(count):
        counted = [programs[dim] for _, programs in grid.table]
        columns.append(_fitted([values for values, _ in grid.table], counted, numbers, dim))
    table = tuple((values, tuple(column[row] for column in columns)) for row, (values, _) in enumerate(grid.table))
    return replace(grid, table=table)


def _fitted(entries: Sequence[tuple[Value, ...]], counted: Sequence[int], numbers: _Numbers, dim: int) -> list[int]:
    target = tuple(counted)
    found = {new for old, new in _formulas(entries, numbers) if old == target}
    if not found and len(set(target)) == 1:
        found = {target}  # as many programs as the device runs at once, for example
    if not found:
        raise UnclearError(f"dimension {dim} of its grid follows no sizes")
    if len(found) > 1:
        raise UnclearError(f"dimension {dim} of its grid may follow several sizes")
    return list(found.pop())


def _formulas(
    entries: Sequence[tuple[Value, ...]], numbers: _Numbers
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Programs by each formula: a size, a size by blocks, and products of two such."""
    sizes = [(old, new) for old, news in numbers.meanings.items() for new in news]
    width = len(entries[0]) if entries else 0
    axes = [index for index in range(width) if all(type(values[index]) is int for values in entries)]
    blocks = [()] + [(axis,) for axis in axes] + list(itertools.combinations(axes, 2))
    terms = set()
    for (old, new), by in itertools.product(sizes, blocks):
        divisors = [math.prod(values[axis] for axis in by) for values in entries]
        if all(divisors):
            terms.add((tuple(-(-old // by) for by in divisors), tuple(-(-new // by) for by in divisors)))
    ones = (1,) * len(entries)
    for first, second in itertools.combinations_with_replacement([*terms, (ones, ones)], 2):
        yield tuple(
            tuple(a * b for a, b in zip(one, other, strict=True)) for one, other in zip(first, second, strict=True)
        )  # type: ignore[misc]
