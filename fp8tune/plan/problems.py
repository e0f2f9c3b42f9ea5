"""What a sweep will try: problems from shape rows, configs from grids, pruned ones with their reason.

Knows kernels only through their KernelSpec, and so needs neither torch nor triton.
"""

from __future__ import annotations

import contextlib
import itertools
import keyword
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from fp8tune.errors import UsageError, in_spec, unknown
from fp8tune.records import NamedInts, Problem
from fp8tune.replay.spec import RecordedSpec
from fp8tune.text import NAME
from fp8tune_kernels.spec import DTYPE_FLAG, DTYPES, LAUNCH_OPTIONS, LAYOUT_FLAG, ROUTINGS, DeviceLimits, KernelSpec

Axes = Mapping[str, tuple[int, ...]]
"""A grid: axis name -> values, in declaration order."""

FP8_DTYPES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")

LARGEST_VALUE = 2**20
"""Triton's limit on the elements of a block, so that no axis can mean more."""

LARGEST_BYTES = 2**40
"""No accelerator has as much memory for one input and output: 1 TiB."""

MOST_GROUPS = 2**20
"""Groups (experts) of one problem: each has an end row, and no model has as many."""


def parse_grid(texts: Iterable[str], axes: Axes, optional: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """``axes`` with the values that texts such as ``num_warps=4,8`` give: fewer than declared, others, or both.

    ``optional``: axes of the arch that no kernel declares; they join the grid where a text names them.
    Raises UsageError for an unknown axis, one given twice, or values Triton cannot take.
    """
    given: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not values:
            raise UsageError(f"grid {text!r} is not of the form AXIS=VALUE,VALUE: write for example num_warps=4,8")
        if name not in axes and name not in optional:
            raise unknown("grid axis", name, [*axes, *optional])
        if name in given:
            raise UsageError(f"grid axis {name} is given twice: write its values in one list")
        given[name] = tuple(
            dict.fromkeys(_grid_value(name, value.strip(), axes.get(name, ())) for value in values.split(","))
        )
    return {name: given.get(name, values) for name, values in axes.items()} | given


def _grid_value(axis: str, text: str, declared: Sequence[int]) -> int:
    # isdecimal and the length keep out signs, underscores and numbers that take forever to read
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
    if value in declared:
        return value
    if not 1 <= value <= LARGEST_VALUE:
        raise UsageError(f"grid axis {axis} takes integers from 1 to {LARGEST_VALUE}, not {text!r}")
    if (axis in ("num_warps", "num_ctas") or axis.startswith("BLOCK")) and value & (value - 1):
        raise UsageError(f"grid axis {axis} takes powers of two, not {value}: Triton allows no other")
    return value


def problems(
    spec: KernelSpec,
    rows: Iterable[Mapping[str, int]],
    *,
    routing: str = "jagged",
    in_dtype: str | None = None,
    fp8_dtype: str = "float8_e4m3fn",
    scale_mode: str | None = None,
    seed: int = 0,
) -> list[Problem]:
    """The kernel's problems in a shape set, in its order and without duplicates; each once for every input layout and
    dtype. A kernel that was recorded has the problems of its recording.

    ``in_dtype`` None is all that the kernel declares, but for FP8 formats of other hardware where it declares
    ``fp8_dtype`` too; ``scale_mode`` None is the first. A kernel without groups, FP8 or scale modes ignores what is
    said of them. Raises UsageError for an unknown name, and where the rows hold no problem for this kernel.
    """
    if spec.recorded:
        return [replace(problem, seed=seed) for problem in spec.recorded]
    in_dtypes = _of_the_arch(spec.in_dtypes, fp8_dtype) if in_dtype is None else (in_dtype,)
    mode = (scale_mode or spec.scale_modes[0]) if spec.scale_modes else ""
    for what, name, names in (
        ("routing", routing, ROUTINGS),
        *(("input dtype", name, DTYPES) for name in in_dtypes),
        ("fp8 dtype", fp8_dtype, FP8_DTYPES),
        (f"scale mode of {spec.name}", mode, spec.scale_modes or ("",)),
    ):
        if name not in names:
            raise unknown(what, name, names)
    spread, fp8 = routing if spec.routed else "none", fp8_dtype if spec.uses_fp8 else ""
    rows, lacking = list(rows), dict[str, None]()
    found = dict.fromkeys(
        Problem(spec.name, shape, spread, layout, dtype, fp8, mode, seed)
        for row in rows
        for shape in _shapes(spec, row, lacking)
        for layout in spec.input_layouts
        for dtype in in_dtypes
    )
    if not found:
        named = ", ".join(dict.fromkeys(dim for row in rows for dim in row))
        asked = f"ask for {', '.join(lacking)}, and the shapes have {named}" if lacking else "are none"
        raise UsageError(f"the shapes hold no problem for {spec.name}: its problems {asked}; give others with --shapes")
    for problem in found:
        check_size(spec, problem)
    return list(found)


def _of_the_arch(in_dtypes: tuple[str, ...], fp8_dtype: str) -> tuple[str, ...]:
    """Without the e4m3 formats of other arches, where ``fp8_dtype`` is among them: no arch multiplies both."""
    if fp8_dtype not in in_dtypes:
        return in_dtypes
    return tuple(name for name in in_dtypes if name == fp8_dtype or not name.startswith("float8_e4m3"))


def check_shape(spec: KernelSpec, problem: Problem) -> None:
    """Raise UsageError for a problem that lacks a dim of the kernel's key, or that :func:`check_size` refuses."""
    named = {name.removesuffix("_bucket") for name in spec.key} - {LAYOUT_FLAG, DTYPE_FLAG}
    if missing := sorted(named - {*problem.shape}):
        raise UsageError(f"{spec.name} needs {missing[0]}, which the shape {problem.shape} lacks")
    check_size(spec, problem)


def check_size(spec: KernelSpec, problem: Problem) -> None:
    """Raise UsageError for a problem that lacks a dim which is moved, or is beyond what any memory holds."""
    shape = problem.shape
    if spec.routed and shape.get("G", 1) > MOST_GROUPS:
        raise UsageError(f"{spec.name} {shape} has more than {MOST_GROUPS:,} groups: no device runs as many")
    try:
        bytes_moved = spec.bytes_of(problem)
    except KeyError as error:
        missing = str(error.args[0] if error.args else "a dim")[:80]
        raise UsageError(f"{spec.name} needs {missing}, which the shape {shape} lacks") from None
    if bytes_moved < 1:
        raise UsageError(f"{spec.name} {shape} moves nothing: give each dim a size of at least 1")
    if bytes_moved > LARGEST_BYTES:
        raise UsageError(f"{spec.name} {shape} moves {bytes_moved:,} bytes: no device has more than {LARGEST_BYTES:,}")


def _shapes(spec: KernelSpec, row: Mapping[str, int], lacking: dict[str, None]) -> list[NamedInts]:
    """The shapes a spec finds in a row, up to the first that needs a dim which the row leaves out: ``lacking`` gets it.

    Raises UsageError for all else that ``problems`` raises, and for what is no shape.
    """
    found: list[NamedInts] = []
    try:
        with contextlib.redirect_stdout(sys.stderr):  # it may print; results have stdout to themselves
            for shape in spec.problems(row):
                found.append(_checked(spec, shape))
    except KeyError as error:
        (dim,) = error.args if len(error.args) == 1 else (None,)
        if not isinstance(dim, str) or not NAME.fullmatch(dim) or dim in row:
            raise in_spec(spec.name, "problems", spec.problems, error) from error
        lacking[dim] = None
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise in_spec(spec.name, "problems", spec.problems, error) from error
    return found


def _checked(spec: KernelSpec, shape: object) -> NamedInts:
    if not isinstance(shape, NamedInts) or not shape:
        raise UsageError(f"problems of kernel {spec.name!r} gives {shape!r:.80}: yield NamedInts of at least one size")
    for name, size in shape.items():
        if not NAME.fullmatch(name) or keyword.iskeyword(name) or type(size) is not int or not 0 <= size < 2**63:
            raise UsageError(f"problems of kernel {spec.name!r} gives the size {name}={size!r:.40}: use whole numbers")
    return shape


def configs(spec: KernelSpec, problem: Problem, axes: Axes, limits: DeviceLimits | None) -> dict[NamedInts, str]:
    """The grid on one problem: config -> the hardware reason why it is pruned, empty for one that is tried.

    The declared default comes first, then the product of ``axes`` in declaration order; of a spec that lists its
    configs those, and each with every value of an axis that was widened. The default is never pruned, because users get
    it where the table is silent; only a recorded kernel prunes its own. ``limits`` None prunes only what is no answer
    to the problem (``spec.excluded``).
    """
    default = NamedInts([(name, spec.default[name]) for name in axes if name in spec.default])
    asked: Sequence[NamedInts] = ()
    if spec.configs:
        asked = _widened(spec, axes)
        listed = spec.configs if spec.recorded else _within(spec.configs, axes, spec.axes)
        grid = [*listed, *asked]
    else:
        grid = [NamedInts(list(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    found, sizes = dict.fromkeys([default, *grid], ""), problem.shape if spec.recorded else spec.sizes(problem)
    for config in found:
        if config != spec.default and (reason := spec.excluded(config, problem.shape)):
            found[config] = reason
        elif spec.recorded or (limits is not None and config != spec.default):
            # what a recorded kernel prunes it prunes everywhere: no limits are looked at
            found[config] = spec.invalid(config, sizes, cast(DeviceLimits, limits)) or ""
        if isinstance(spec, RecordedSpec) and not found[config] and config not in asked:
            found[config] = spec.unlisted(config, problem) or ""
    return found


def _within(configs: Sequence[NamedInts], axes: Axes, declared: Axes) -> list[NamedInts]:
    """The listed configs with values of ``axes``, where those are narrower than declared."""
    return [
        each for each in configs if all(each.get(name) in values for name, values in axes.items() if name in declared)
    ]


def _widened(spec: KernelSpec, axes: Axes) -> list[NamedInts]:
    """Each of the declared configs with every value of the axes that are not as declared."""
    given = {name: values for name, values in axes.items() if values != spec.axes.get(name)}
    if not spec.recorded:  # a value that is declared stands in the list, with what goes with it
        given = {name: values for name, values in given.items() if not {*values} <= {*spec.axes.get(name, ())}}
    product = itertools.product(*given.values())
    changed = [dict(zip(given, values, strict=True)) for values in product] if given else []
    return [NamedInts({**config, **other}) for config in spec.configs for other in changed]


def interpreter_configs(
    spec: KernelSpec, full_size: Iterable[Problem], axes: Axes
) -> dict[Problem, dict[NamedInts, str]]:
    """What Triton's interpreter can run: problems scaled down, one config for each set of block sizes.

    The interpreter ignores launch options, so they take the default's values. It has no limits, so nothing is pruned.
    """
    small = dict.fromkeys(spec.scaled_down(problem) for problem in full_size)
    if strange := [problem for problem in small if not isinstance(problem, Problem)]:
        raise UsageError(f"scaled_down of kernel {spec.name!r} gives {strange[0]!r:.80}: return a Problem")
    block_sizes = {name: (spec.default[name],) if name in LAUNCH_OPTIONS else values for name, values in axes.items()}
    if not spec.configs:
        return {problem: configs(spec, problem, block_sizes, limits=None) for problem in small}
    found: dict[Problem, dict[NamedInts, str]] = {}
    for problem in small:
        blocks: dict[NamedInts, NamedInts] = {}
        of = configs(spec, problem, axes, limits=None)
        for config in of:
            blocks.setdefault(NamedInts([one for one in config.items() if one[0] not in LAUNCH_OPTIONS]), config)
        found[problem] = {config: of[config] for config in blocks.values()}
    return found


def seed_text(problem: Problem) -> str:
    """What every permutation and every simulated time of a problem depends on: this text must never change.

    It is what ``repr`` gave at first. A field added to Problem enters it only with another value than its default.
    """
    return (
        f"Problem(kernel={problem.kernel!r}, shape=NamedInts({problem.shape}), routing={problem.routing!r}, "
        f"input_layout={problem.input_layout!r}, in_dtype={problem.in_dtype!r}, fp8_dtype={problem.fp8_dtype!r}, "
        f"scale_mode={problem.scale_mode!r}, seed={problem.seed})"
    )
