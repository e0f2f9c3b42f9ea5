"""Configs of a kernel on one problem size, and which of them are pruned."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from fp8tune.errors import UsageError, unknown
from fp8tune.records import NamedInts, Problem
from fp8tune.replay.loading import load_spec
from fp8tune.replay.spec import RecordedSpec, default_of
from fp8tune_kernels.spec import LAUNCH_OPTIONS, DeviceLimits, KernelSpec

Axes = Mapping[str, tuple[int, ...]]  # axis name -> values, in declaration order

LARGEST_VALUE = 2**20  # Triton's limit on the elements of a block
MOST_BUILT = 20_000  # configs of a product that is built: a dict of a million takes a gigabyte

CONDITION = re.compile(r"([\w* ]+)(<=|>=|==|!=|<|>)([\w* ]+)", re.ASCII)
OPERATORS: Mapping[str, Callable[[int, int], bool]] = {
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt
}  # fmt: skip


class Grid(Mapping[NamedInts, str]):
    """Configs with the reason why they are pruned, empty for those that are tried. Built when it is first read."""

    recipe: tuple[Any, ...] = ()  # arguments of :func:`of_kernel`, which pickles it without building it

    def __init__(self, size: int, build: Callable[[], Mapping[NamedInts, str]]) -> None:
        self.size = size  # number of configs, as far as it is known without building them
        self._build = build

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (of_kernel, self.recipe) if self.recipe else (dict, ({**self},))

    @cached_property
    def _configs(self) -> Mapping[NamedInts, str]:
        return self._build()

    def __getitem__(self, config: NamedInts) -> str:
        return self._configs[config]

    def __iter__(self) -> Iterator[NamedInts]:
        return iter(self._configs)

    def __len__(self) -> int:
        return len(self._configs)


class Product(Grid):
    """All configs of some axes and the default. Configs and their reasons are computed on demand."""

    def __init__(self, axes: Axes, first: NamedInts, reason: Callable[[NamedInts], str]) -> None:
        self.axes, self._first, self._reason = axes, first, reason
        self._values = {name: frozenset(values) for name, values in axes.items()}
        self._has_first = self._is_in_product(first)
        super().__init__(math.prod(map(len, axes.values())) + (not self._has_first), dict)

    def __getitem__(self, config: NamedInts) -> str:
        if config not in self:
            raise KeyError(config)
        return self._reason(config)

    def __contains__(self, config: object) -> bool:
        return config == self._first or self._is_in_product(config)

    def __iter__(self) -> Iterator[NamedInts]:
        yield self._first
        yield from (config for config in _product(self.axes) if config != self._first)

    def __len__(self) -> int:
        return self.size

    def at(self, number: int) -> NamedInts:
        """Return a config by its number, without those before it."""
        if number == self.size - 1 and not self._has_first:
            return self._first
        items = list[tuple[str, int]]()
        for name, values in reversed([*self.axes.items()]):
            number, place = divmod(number, len(values))
            items.append((name, values[place]))
        return NamedInts(items[::-1])

    def _is_in_product(self, config: object) -> bool:
        is_config = isinstance(config, NamedInts) and config.keys() == self.axes.keys()
        return is_config and all(value in self._values[name] for name, value in cast(NamedInts, config).items())


@dataclass(frozen=True)
class Condition:
    """A condition between axes, such as ``BLOCK_M*BLOCK_N<=16384``: products of axes and integers are compared."""

    text: str
    left: tuple[str, ...]
    compare: Callable[[int, int], bool]
    right: tuple[str, ...]

    def holds(self, config: Mapping[str, int]) -> bool:
        """Return True if a config meets it."""
        left, right = (
            math.prod(int(factor) if factor.isdecimal() else config[factor] for factor in side)
            for side in (self.left, self.right)
        )
        return self.compare(left, right)


def parse_conditions(texts: Iterable[str], axes: Collection[str]) -> tuple[Condition, ...]:
    """Return the conditions of ``--grid``. Raises UsageError for one that names no axis, or an unknown one."""
    conditions = []
    for text, match in ((text, CONDITION.fullmatch(text)) for text in texts):
        if match is None:
            continue
        left, right = (tuple(factor.strip() for factor in match[side].split("*")) for side in (1, 3))
        names = [factor for factor in (*left, *right) if not factor.isdecimal() or len(factor) > 9]
        if strange := [name for name in names if name not in axes]:
            raise unknown("grid axis", strange[0], axes)
        if not names:
            raise UsageError(f"grid condition {text!r} names no axis: write for example BLOCK_M*BLOCK_N<=16384")
        conditions.append(Condition(text, left, OPERATORS[match[2]], right))
    return tuple(conditions)


def parse_grid(texts: Iterable[str], axes: Axes, optional: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Return ``axes`` with the values of texts such as ``num_warps=4,8`` in place of their own.

    ``optional`` axes are of the arch; they join the grid where a text names them. Conditions are left to
    :func:`parse_conditions`. Raises UsageError for an unknown or repeated axis, or values that Triton does not accept.
    """
    chosen: dict[str, tuple[int, ...]] = {}
    for text in itertools.filterfalse(CONDITION.fullmatch, texts):
        name, _, values = (part.strip() for part in text.partition("="))
        if not values:
            raise UsageError(f"grid {text!r} is not of the form AXIS=VALUE,VALUE: write for example num_warps=4,8")
        if name not in axes and name not in optional:
            raise unknown("grid axis", name, [*axes, *optional])
        if name in chosen:
            raise UsageError(f"grid axis {name} is given twice: write its values in one list")
        numbers = (_grid_value(name, value.strip(), axes.get(name, ())) for value in values.split(","))
        chosen[name] = tuple(dict.fromkeys(numbers))
    return {**axes, **chosen}


def named_axes(texts: Iterable[str]) -> frozenset[str]:
    """Return the axes whose values ``--grid`` names."""
    return frozenset(text.partition("=")[0].strip() for text in itertools.filterfalse(CONDITION.fullmatch, texts))


def _grid_value(axis: str, text: str, declared: Sequence[int]) -> int:
    # isdecimal and the length exclude signs, underscores and numbers that take forever to parse
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
    if value not in declared and not 1 <= value <= LARGEST_VALUE:
        raise UsageError(f"grid axis {axis} takes integers from 1 to {LARGEST_VALUE}, not {text!r}")
    is_power = axis in ("num_warps", "num_ctas") or axis.startswith("BLOCK")
    if value not in declared and is_power and value & (value - 1):
        raise UsageError(f"grid axis {axis} takes powers of two, not {value}: Triton allows no other")
    return value


def of_kernel(reference: str, *arguments: Any) -> Grid:
    """Return the grid of one problem size of a kernel that is named, as :func:`configs` does with its spec."""
    grid = configs(load_spec(reference), *arguments)
    grid.recipe = reference, *arguments
    return grid


def configs(
    spec: KernelSpec,
    problem: Problem,
    axes: Axes,
    limits: DeviceLimits | None,
    conditions: Sequence[Condition] = (),
    named: Collection[str] = (),
) -> Grid:
    """Return the grid of one problem size.

    The declared default comes first, and is never pruned because it is what a lookup without a table gives. Then comes
    the product of ``axes`` in declaration order; of a spec that lists its configs those, and each with every value of
    an axis that was widened. A recorded kernel lists its configs, and each ``named`` axis is widened: of a bare kernel
    that product alone is tried. Without ``limits`` only configs that cannot solve the problem are pruned, and those
    that do not meet the conditions.
    """
    own = default_of(spec, problem)
    default = NamedInts([(name, own[name]) for name in axes if name in own])
    listed = spec.listed(problem) if isinstance(spec, RecordedSpec) else spec.configs
    widened = dict.fromkeys(_widened(spec, listed, axes, named))

    def reason(config: NamedInts) -> str:
        is_default = config == own
        unmet = (condition.text for condition in conditions if not is_default and not condition.holds(config))
        if text := next(unmet, ""):
            return f"{text} does not hold"
        pruned = None if is_default else spec.excluded(config, problem.shape)
        if isinstance(spec, RecordedSpec):  # it prunes by its own function, on every device
            pruned = pruned or spec.pruned(config, problem)
        elif not pruned and limits is not None and not is_default:
            pruned = spec.invalid(config, spec.sizes(problem), limits)
        return pruned or ""

    if isinstance(spec, RecordedSpec):
        known = dict.fromkeys([default, *(() if spec.is_bare and widened else listed), *widened])
        return Grid(len(known), lambda: {config: reason(config) for config in known})
    if spec.configs:
        declared = axes.keys() & spec.axes.keys()
        listed = [config for config in spec.configs if all(config.get(name) in axes[name] for name in declared)]
        known = dict.fromkeys([default, *listed, *widened])
        return Grid(len(known), lambda: {config: reason(config) for config in known})
    size = math.prod(map(len, axes.values()))
    if size > MOST_BUILT:
        return Product(axes, default, reason)
    return Grid(
        size, lambda: {config: reason(config) for config in dict.fromkeys([default, *_product(axes), *widened])}
    )


def _product(axes: Axes) -> Iterator[NamedInts]:
    return (NamedInts(list(zip(axes, values, strict=True))) for values in itertools.product(*axes.values()))


def _widened(spec: KernelSpec, listed: Sequence[NamedInts], axes: Axes, named: Collection[str]) -> Iterator[NamedInts]:
    """Yield each listed config with every value of the axes that have values which are not declared.

    The axes of a recorded kernel declare nothing, they have what occurs in its configs: there every named axis counts.
    """

    def is_widened(name: str) -> bool:
        return name in named if spec.recorded else not {*axes[name]} <= {*spec.axes.get(name, ())}

    widened = {name: axes[name] for name in axes if is_widened(name)}
    for config in listed if widened else ():
        yield from (NamedInts({**config, **values}) for values in _product(widened))


def interpreter_configs(spec: KernelSpec, problem: Problem, axes: Axes, named: Collection[str] = ()) -> Grid:
    """Return what Triton's interpreter tells apart on a small problem size: one config for each set of block sizes.

    It ignores launch options and has no limits.
    """
    if not spec.configs:
        axes = {name: (spec.default[name],) if name in LAUNCH_OPTIONS else values for name, values in axes.items()}
        return configs(spec, problem, axes, limits=None)
    blocks: dict[frozenset[tuple[str, int]], tuple[NamedInts, str]] = {}
    for config, reason in configs(spec, problem, axes, limits=None, named=named).items():
        sizes = frozenset((name, value) for name, value in config.items() if name not in LAUNCH_OPTIONS)
        blocks.setdefault(sizes, (config, reason))
    return Grid(len(blocks), lambda: dict(blocks.values()))
