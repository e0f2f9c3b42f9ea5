"""Make a recorded launch smaller, at sizes that no block divides, to show a dropped tail or a missing mask.

Each size of a tensor becomes another one, everywhere it occurs: in shapes, strides, scalars, integer values and the
grid. A size that 16 divides stays so (16 times an odd number), any other becomes a prime, so that the same code is
compiled. A size that no argument and no grid tells the kernel stays: its code has it as a literal. Nothing is guessed:
where a number has two meanings or none, there are no other sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fp8tune.replay.recording import Argument, Grid, Launch, Scalar, Tensor, Value

KEPT = 16  # sizes up to this stay: groups, heads, blocks of a scale
MULTIPLES_OF_16 = (208, 176, 144, 112, 240, 272, 80, 48, 304, 16)
PRIMES = (157, 101, 67, 131, 83, 113, 59, 43, 31, 23, 17)


class UnclearError(Exception):
    """A number whose meaning cannot be told; the text names it."""


def odd(launch: Launch) -> Launch | str:
    """Return the launch at other sizes, or the reason why there is none."""
    try:
        resizing = _Resizing(launch)
        return replace(launch, arguments=tuple(map(resizing.argument, launch.arguments)), grid=resizing.grid())
    except UnclearError as unclear:
        return str(unclear)


class _Resizing:
    """New values for the numbers of a launch."""

    def __init__(self, launch: Launch) -> None:
        self.names = {argument.name for argument in launch.arguments}
        self.table = launch.grid
        self.rows = [values for values, _ in launch.grid.table]
        self.columns = list(zip(*(programs for _, programs in launch.grid.table), strict=False))
        self.ones = (1,) * len(self.rows)
        self.sizes: dict[int, int] = {}
        every = {size for tensor in launch.tensors for size in tensor.shape if size > KEPT}
        for size in sorted(every & self._visible(launch), reverse=True):
            choices = MULTIPLES_OF_16 if size % 16 == 0 else PRIMES
            free = [choice for choice in choices if choice < size and choice not in self.sizes.values()]
            self.sizes |= {size: free[0]} if free else {}
        if not self.sizes:
            raise UnclearError("it has no size above 16 that its arguments or its grid tell")
        self.meanings: dict[int, set[int]] = {}  # size, or product of neighbouring sizes -> what it may become
        self.strides: dict[int, set[int]] = {}
        for tensor in launch.tensors:
            shape, counts = tensor.shape, range(1, len(tensor.shape) + 1)
            for dims in [*((size,) for size in shape), *(d for n in counts for d in (shape[:n], shape[-n:]))]:
                self.meanings.setdefault(math.prod(dims), set()).add(math.prod(map(self.size, dims)))
            for stride, new in zip(tensor.strides, self._new_strides(tensor), strict=True):
                self.strides.setdefault(stride, set()).add(new)

    def size(self, size: int) -> int:
        """Return the new size of a dimension."""
        return self.sizes.get(size, size)

    def _visible(self, launch: Launch) -> set[int]:
        """Return the sizes of tensors that the kernel gets, as an argument or by its grid.

        Of a tensor whose number of elements alone it gets, that is the longest.
        """
        numbers = {number for tensor in launch.tensors for number in (*tensor.shape, math.prod(tensor.shape))}
        terms = {self.ones}.union(*map(self._by_blocks, numbers))
        visible = {value for value in launch.scalars.values() if type(value) is int}
        for number in numbers - visible:
            own = {*self._by_blocks(number)} - {self.ones}
            visible |= {number} if any(_times(a, b) in self.columns for a in own for b in terms) else set()
        described = {size for tensor in launch.tensors if tensor.descriptor for size in tensor.shape}
        whole = {max(item.shape) for item in launch.tensors if item.shape and math.prod(item.shape) in visible}
        return visible | described | whole

    def _new_strides(self, tensor: Tensor) -> tuple[int, ...]:
        """Return strides of a dense tensor in any order of its dims. Raises UnclearError for any other."""
        strides, old, new = [0] * len(tensor.shape), 1, 1
        for dim in sorted(range(len(tensor.shape)), key=lambda dim: (tensor.strides[dim], tensor.shape[dim])):
            stride, size = tensor.strides[dim], tensor.shape[dim]
            if size == 1 and stride:
                strides[dim] = next(iter(self.strides.get(stride, ())), self.size(stride))
            elif stride:
                if stride != old:
                    raise UnclearError(f"{tensor.name} has gaps between its elements")
                strides[dim], old, new = new, old * size, new * self.size(size)
        return tuple(strides)

    def argument(self, argument: Argument) -> Argument:
        """Return an argument at the new sizes. Raises UnclearError for a number with more than one meaning, or none."""
        if isinstance(argument, Scalar):
            name = argument.name  # a constant is a block by its name: BLOCK_N, or BD beside an argument D
            is_block = "BLOCK" in name.upper() or (name.startswith("B") and name[1:] in self.names)
            is_size = type(argument.value) is int and not (argument.is_constexpr and is_block)
            return replace(argument, value=self._scalar(argument)) if is_size else argument
        shape = tuple(map(self.size, argument.shape))
        if argument.offset and shape != argument.shape:
            raise UnclearError(f"{argument.name} begins inside another tensor")
        resized = replace(argument, shape=shape, strides=self._new_strides(argument))
        return self._integers(resized, argument) if argument.is_integer and argument.dtype != "bool" else resized

    def _scalar(self, scalar: Scalar) -> int:
        value = scalar.value
        both = (self.strides, self.meanings) if "stride" in scalar.name.lower() else (self.meanings, self.strides)
        meanings = next((known[value] for known in both if value in known), set[int]())
        if len(meanings) > 1:
            raise UnclearError(f"{scalar.name}={value} may be several sizes")
        if not meanings and value > KEPT and not scalar.is_constexpr:
            raise UnclearError(f"{scalar.name}={value} is no size of a tensor")
        return next(iter(meanings), int(value))

    def _integers(self, resized: Tensor, recorded: Tensor) -> Tensor:
        """Scale values up to a size, such as group ends, as the size is. Raises UnclearError for other large ones."""
        values = recorded.integers
        least, most = (min(values), max(values)) if values else (recorded.least, recorded.most)
        if values is not None and resized.shape != recorded.shape:
            count = math.prod(resized.shape)
            values = tuple(values[index * len(values) // count] for index in range(count))
        if most is None or most <= KEPT:
            return replace(resized, values=values, packed="")
        old = next((size for size in self.sizes if size in (most, most + 1)), None)
        if old is None:
            raise UnclearError(f"{recorded.name} holds values up to {int(most)}, which is no size of a tensor")
        new = self.sizes[old]
        largest = new if most == old else new - 1
        *scaled, scaled_least = [min(int(value) * new // old, largest) for value in (*(values or ()), least or 0)]
        least = None if least is None else float(scaled_least)
        values = None if values is None else tuple(scaled)
        return replace(resized, values=values, packed="", least=least, most=float(largest))

    def grid(self) -> Grid:
        """Return the grid at the new sizes. Raises UnclearError unless one formula alone explains every entry.

        A formula is a size, a size by blocks, or the product of two such.
        """
        if len({len(programs) for _, programs in self.table.table}) > 1:
            raise UnclearError("its grid has not always as many dimensions")
        meanings = [(old, new) for old, news in self.meanings.items() for new in news]
        terms = {pair for both in meanings for pair in zip(*map(self._by_blocks, both), strict=True)}
        columns: list[tuple[int, ...]] = []
        for dim, column in enumerate(self.columns):
            pairs = itertools.combinations_with_replacement([*terms, (self.ones, self.ones)], 2)
            fitting = {_times(left[1], right[1]) for left, right in pairs if _times(left[0], right[0]) == column}
            if not fitting and len(set(column)) == 1:
                fitting = {column}  # as many programs as the device runs at once, for example
            if len(fitting) != 1:
                reason = "may follow several sizes" if fitting else "follows no sizes"
                raise UnclearError(f"dimension {dim} of its grid {reason}")
            columns += fitting
        programs = zip(*columns, strict=True) if columns else itertools.repeat(())
        return replace(self.table, table=tuple(zip(self.rows, programs, strict=False)))

    def _by_blocks(self, number: int) -> list[tuple[int, ...]]:
        """Return a number for each row, and how often the blocks of one or two axes fit into it, rounded up."""
        width = len(self.rows[0]) if self.rows else 0
        axes = [axis for axis in range(width) if all(type(row[axis]) is int and row[axis] for row in self.rows)]
        blocks: list[Sequence[int]] = [(), *((axis,) for axis in axes), *itertools.combinations(axes, 2)]
        return [tuple(-(-number // math.prod(row[axis] for axis in by)) for row in self.rows) for by in blocks]


def _times(left: Iterable[Value], right: Iterable[Value]) -> tuple[int, ...]:
    return tuple(a * b for a, b in zip(left, right, strict=True))
