"""Make a recorded launch smaller, at sizes that no block divides, to show a dropped tail or a missing mask.

Each size of a tensor becomes another one, everywhere it occurs: in shapes, strides, scalars, integer values and the
grid. A size that 16 divides stays so (16 times an odd number), any other becomes a prime, so that the same code is
compiled. A size that no argument and no grid tells the kernel stays: its code has it as a literal. Nothing is guessed:
where a number has two meanings or none, there are no other sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fp8tune.replay.recording import Argument, Grid, Launch, Scalar, Tensor, Value

KEPT = 16
"""Sizes up to this stay: groups, heads, blocks of a scale."""

MULTIPLES_OF_16 = (208, 176, 144, 112, 240, 272, 80, 48, 304, 16)
PRIMES = (157, 101, 67, 131, 83, 113, 59, 43, 31, 23, 17)


class UnclearError(Exception):
    """A number whose meaning cannot be told; the text names it."""


def odd(launch: Launch) -> Launch | str:
    """Return the launch at other sizes, or the reason why there is none."""
    try:
        sizes = _substituted(launch)
        if not sizes:
            return "it has no size above 16 that its arguments or its grid tell"
        numbers = _Numbers(launch, sizes)
        arguments = tuple(_argument(argument, numbers) for argument in launch.arguments)
        return replace(launch, arguments=arguments, grid=_grid(launch.grid, numbers))
    except UnclearError as unclear:
        return str(unclear)


def _substituted(launch: Launch) -> dict[int, int]:
    """Return size -> the one that takes its place."""
    every = {size for tensor in launch.tensors for size in tensor.shape if size > KEPT}
    substitutes: dict[int, int] = {}
    for size in sorted(every & _visible_sizes(launch), reverse=True):
        choices = MULTIPLES_OF_16 if size % 16 == 0 else PRIMES
        free = [choice for choice in choices if choice < size and choice not in substitutes.values()]
        if free:
            substitutes[size] = free[0]
    return substitutes


def _visible_sizes(launch: Launch) -> set[int]:
    """Return the sizes of tensors that the kernel gets, as an argument or by its grid.

    Of a tensor whose number of elements alone it gets, that is the longest.
    """
    scalars = {value for value in launch.scalars.values() if type(value) is int}
    entries, programs = [values for values, _ in launch.grid.table], [programs for _, programs in launch.grid.table]
    columns = set(zip(*programs, strict=False))
    known = {number for tensor in launch.tensors for number in (*tensor.shape, math.prod(tensor.shape))}
    ones = (1,) * len(entries)
    terms = {ones}.union(*(_by_blocks(entries, number) for number in known))

    def is_visible(number: int) -> bool:
        own = {*_by_blocks(entries, number)} - {ones}
        return number in scalars or any(_times(term, factor) in columns for term in own for factor in terms)

    visible = set[int]()
    for tensor in launch.tensors:
        visible |= {size for size in tensor.shape if tensor.descriptor or is_visible(size)}
        visible |= {max(tensor.shape)} if tensor.shape and is_visible(math.prod(tensor.shape)) else set()
    return visible


class _Numbers:
    """The new value of each number of the launch."""

    def __init__(self, launch: Launch, sizes: Mapping[int, int]) -> None:
        self.sizes = sizes
        self.names = {argument.name for argument in launch.arguments}
        self.meanings: dict[int, set[int]] = {}
        self.strides: dict[int, set[int]] = {}
        for tensor in launch.tensors:
            for size in tensor.shape:
                self.meanings.setdefault(size, set()).add(self.size(size))
            for count in range(2, len(tensor.shape) + 1):
                for dims in (tensor.shape[:count], tensor.shape[-count:]):
                    self.meanings.setdefault(math.prod(dims), set()).add(math.prod(map(self.size, dims)))
            for stride, new in zip(tensor.strides, self.new_strides(tensor), strict=True):
                self.strides.setdefault(stride, set()).add(new)

    def size(self, size: int) -> int:
        return self.sizes.get(size, size)

    def new_strides(self, tensor: Tensor) -> tuple[int, ...]:
        """Return strides of a dense tensor in any order of its dims. Raises UnclearError for any other."""
        strides, old, new = [0] * len(tensor.shape), 1, 1
        for dim in sorted(range(len(tensor.shape)), key=lambda dim: (tensor.strides[dim], tensor.shape[dim])):
            stride, size = tensor.strides[dim], tensor.shape[dim]
            if stride == 0:
                continue
            if size == 1:
                strides[dim] = next(iter(self.strides.get(stride, ())), self.size(stride))
                continue
            if stride != old:
                raise UnclearError(f"{tensor.name} has gaps between its elements")
            strides[dim], old, new = new, old * size, new * self.size(size)
        return tuple(strides)

    def is_block(self, name: str) -> bool:
        """Return True for a constant that is a block by its name: ``BLOCK_N``, or ``BD`` beside an argument ``D``."""
        return "BLOCK" in name.upper() or (name.startswith("B") and name[1:] in self.names)

    def scalar(self, scalar: Scalar) -> int:
        """Return the new value. Raises UnclearError for a number with more than one meaning, or none."""
        value = scalar.value
        both = (self.strides, self.meanings) if "stride" in scalar.name.lower() else (self.meanings, self.strides)
        meanings = next((known[value] for known in both if value in known), None)
        if meanings is None:
            if value <= KEPT or scalar.is_constexpr:
                return int(value)
            raise UnclearError(f"{scalar.name}={value} is no size of a tensor")
        if len(meanings) > 1:
            raise UnclearError(f"{scalar.name}={value} may be several sizes")
        return next(iter(meanings))


def _argument(argument: Argument, numbers: _Numbers) -> Argument:
    if isinstance(argument, Scalar):
        if type(argument.value) is not int or (argument.is_constexpr and numbers.is_block(argument.name)):
            return argument
        return replace(argument, value=numbers.scalar(argument))
    shape = tuple(map(numbers.size, argument.shape))
    if argument.offset and shape != argument.shape:
        raise UnclearError(f"{argument.name} begins inside another tensor")
    resized = replace(argument, shape=shape, strides=numbers.new_strides(argument))
    return _integers(resized, argument, numbers) if argument.is_integer and argument.dtype != "bool" else resized


def _integers(resized: Tensor, recorded: Tensor, numbers: _Numbers) -> Tensor:
    """Scale values up to a size, such as group ends, as the size is. Raises UnclearError for other large ones."""
    values = recorded.integers
    least, most = (min(values), max(values)) if values else (recorded.least, recorded.most)
    if values is not None and resized.shape != recorded.shape:
        count, recorded_count = math.prod(resized.shape), len(values)
        values = tuple(values[index * recorded_count // count] for index in range(count))
    if most is None or most <= KEPT:
        return replace(resized, values=values, packed="")
    old = next((size for size in numbers.sizes if size in (most, most + 1)), None)
    if old is None:
        raise UnclearError(f"{recorded.name} holds values up to {int(most)}, which is no size of a tensor")
    new = numbers.sizes[old]
    largest = new if most == old else new - 1

    def scaled(value: float) -> int:
        return min(int(value) * new // old, largest)

    values = None if values is None else tuple(map(scaled, values))
    return replace(
        resized, values=values, packed="", least=None if least is None else float(scaled(least)), most=float(largest)
    )


def _grid(grid: Grid, numbers: _Numbers) -> Grid:
    """Return the grid at the new sizes. Raises UnclearError unless one formula alone explains every entry."""
    count = max((len(programs) for _, programs in grid.table), default=0)
    if any(len(programs) != count for _, programs in grid.table):
        raise UnclearError("its grid has not always as many dimensions")
    entries = [values for values, _ in grid.table]
    columns = [
        _fitted(entries, tuple(programs[dim] for _, programs in grid.table), numbers, dim) for dim in range(count)
    ]
    table = tuple((values, tuple(column[row] for column in columns)) for row, values in enumerate(entries))
    return replace(grid, table=table)


def _fitted(
    entries: Sequence[tuple[Value, ...]], counts: tuple[int, ...], numbers: _Numbers, dim: int
) -> Sequence[int]:
    fitting = {new for old, new in _formulas(entries, numbers) if old == counts}
    if not fitting and len(set(counts)) == 1:
        return counts  # as many programs as the device runs at once, for example
    if not fitting:
        raise UnclearError(f"dimension {dim} of its grid follows no sizes")
    if len(fitting) > 1:
        raise UnclearError(f"dimension {dim} of its grid may follow several sizes")
    return fitting.pop()


def _formulas(
    entries: Sequence[tuple[Value, ...]], numbers: _Numbers
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield programs by each formula, at old and new sizes: a size, a size by blocks, and products of two such."""
    terms = {
        pair
        for old, news in numbers.meanings.items()
        for new in news
        for pair in zip(_by_blocks(entries, old), _by_blocks(entries, new), strict=True)
    }
    ones = (1,) * len(entries)
    for left, right in itertools.combinations_with_replacement([*terms, (ones, ones)], 2):
        yield _times(left[0], right[0]), _times(left[1], right[1])


def _by_blocks(entries: Sequence[tuple[Value, ...]], number: int) -> list[tuple[int, ...]]:
    """Return a number for each entry, and how often the blocks of one or two axes fit into it, rounded up."""
    width = len(entries[0]) if entries else 0
    axes = [index for index in range(width) if all(type(values[index]) is int and values[index] for values in entries)]
    blocks = [(), *((axis,) for axis in axes), *itertools.combinations(axes, 2)]
    return [tuple(-(-number // math.prod(values[axis] for axis in by)) for values in entries) for by in blocks]


def _times(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a * b for a, b in zip(left, right, strict=True))
