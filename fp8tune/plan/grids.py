"""Configs of a kernel on one problem size, and which of them are pruned."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import cast

from fp8tune.errors import UsageError, unknown
from fp8tune.records import NamedInts, Problem
from fp8tune.replay.spec import RecordedSpec
from fp8tune_kernels.spec import LAUNCH_OPTIONS, DeviceLimits, KernelSpec

Axes = Mapping[str, tuple[int, ...]]
"""Axis name -> values, in declaration order."""

LARGEST_VALUE = 2**20
"""Triton's limit on the elements of a block."""


def parse_grid(texts: Iterable[str], axes: Axes, optional: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Return ``axes`` with the values of texts such as ``num_warps=4,8`` in place of their own.

    ``optional`` axes are of the arch; they join the grid where a text names them. Raises UsageError for an unknown or
    repeated axis, or values that Triton does not accept.
    """
    chosen: dict[str, tuple[int, ...]] = {}
    for text in texts:
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


def _grid_value(axis: str, text: str, declared: Sequence[int]) -> int:
    # isdecimal and the length exclude signs, underscores and numbers that take forever to parse
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
    if value in declared:
        return value
    if not 1 <= value <= LARGEST_VALUE:
        raise UsageError(f"grid axis {axis} takes integers from 1 to {LARGEST_VALUE}, not {text!r}")
    if (axis in ("num_warps", "num_ctas") or axis.startswith("BLOCK")) and value & (value - 1):
        raise UsageError(f"grid axis {axis} takes powers of two, not {value}: Triton allows no other")
    return value


def configs(spec: KernelSpec, problem: Problem, axes: Axes, limits: DeviceLimits | None) -> dict[NamedInts, str]:
    """Return the configs of one problem size with the reason why they are pruned, empty for those that are tried.

    The declared default comes first, and is never pruned because it is what a lookup without a table gives. Then comes
    the product of ``axes`` in declaration order; of a spec that lists its configs those, and each with every value of
    an axis that was widened. Without ``limits`` only configs that cannot solve the problem are pruned.
    """
    default = NamedInts([(name, spec.default[name]) for name in axes if name in spec.default])
    widened: Collection[NamedInts] = ()
    grid: Iterable[NamedInts]
    if spec.configs:
        widened, declared = dict.fromkeys(_widened(spec, axes)), axes.keys() & spec.axes.keys()
        listed = [c for c in spec.configs if spec.recorded or all(c.get(name) in axes[name] for name in declared)]
        grid = [*listed, *widened]
    else:
        grid = (NamedInts(list(zip(axes, values, strict=True))) for values in itertools.product(*axes.values()))
    sizes = problem.shape if spec.recorded else spec.sizes(problem)

    def reason(config: NamedInts) -> str:
        is_default = config == spec.default
        pruned = None if is_default else spec.excluded(config, problem.shape)
        # A recorded kernel prunes by its own function, on every device.
        if not pruned and (spec.recorded or (limits is not None and not is_default)):
            pruned = spec.invalid(config, sizes, cast(DeviceLimits, limits))
        if not pruned and isinstance(spec, RecordedSpec) and config not in widened:
            pruned = spec.unlisted(config, problem)
        return pruned or ""

    return {config: reason(config) for config in dict.fromkeys(itertools.chain([default], grid))}


def _widened(spec: KernelSpec, axes: Axes) -> list[NamedInts]:
    """Return each listed config with every value of the axes that have values which are not declared."""
    changed = {name: values for name, values in axes.items() if values != spec.axes.get(name)}
    if not spec.recorded:
        changed = {name: values for name, values in changed.items() if not {*values} <= {*spec.axes.get(name, ())}}
    product = [dict(zip(changed, values, strict=True)) for values in itertools.product(*changed.values())]
    return [NamedInts({**config, **values}) for config in spec.configs for values in product] if changed else []


def interpreter_configs(spec: KernelSpec, problem: Problem, axes: Axes) -> dict[NamedInts, str]:
    """Return what Triton's interpreter tells apart on a small problem size: one config for each set of block sizes.

    It ignores launch options and has no limits.
    """
    if not spec.configs:
        axes = {name: (spec.default[name],) if name in LAUNCH_OPTIONS else values for name, values in axes.items()}
    blocks: dict[NamedInts, tuple[NamedInts, str]] = {}
    for config, reason in configs(spec, problem, axes, limits=None).items():
        sizes = NamedInts([(name, value) for name, value in config.items() if name not in LAUNCH_OPTIONS])
        blocks.setdefault(sizes, (config, reason))
    return dict(blocks.values())
