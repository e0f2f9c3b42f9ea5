"""Problem sizes of a kernel in the rows of shape sets.

Knows kernels only through their KernelSpec, and so needs neither torch nor triton.
"""

from __future__ import annotations

import contextlib
import keyword
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from fp8tune.errors import UsageError, in_spec, unknown
from fp8tune.plan.shapes import Settings
from fp8tune.records import NamedInts, Problem
from fp8tune.text import NAME
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.spec import DTYPE_FLAG, LAYOUT_FLAG, KernelSpec

LARGEST_BYTES = 2**40  # 1 TiB of inputs and outputs: no accelerator has as much memory


def problems(
    spec: KernelSpec,
    rows: Iterable[Mapping[str, int]],
    settings: Settings = Settings(),
    *,
    size: Mapping[str, int] = MappingProxyType({}),
    arch: str = "",
) -> list[Problem]:
    """Return the kernel's problem sizes in the rows, in their order and each once for every input layout and dtype.

    A recorded kernel has those of its recording. ``size`` keeps those with such sizes; a dim that a problem size lacks
    is looked up in its row. Unless the settings name one, they have all dtypes that the kernel declares, except FP8
    formats of other arches, and the first scale mode. A kernel without groups, FP8 or scale modes ignores what is given
    for them. Raises UsageError for an unknown name, and if the rows hold no problem size of this kernel.
    """
    if spec.recorded:
        return [replace(problem, seed=settings.seed) for problem in spec.recorded]
    fp8_dtype = ARCHES[arch].fp8_dtype if arch in ARCHES else "float8_e4m3fn"
    in_dtypes = (settings.dtype,) if settings.dtype else spec.in_dtypes
    if not settings.dtype and fp8_dtype in in_dtypes:  # no arch multiplies both e4m3 formats
        in_dtypes = tuple(name for name in in_dtypes if name == fp8_dtype or not name.startswith("float8_e4m3"))
    mode = (settings.scale or spec.scale_modes[0]) if spec.scale_modes else ""
    if mode and mode not in spec.scale_modes:
        raise unknown(f"scale mode of {spec.name}", mode, spec.scale_modes)
    layouts = (settings.layout,) if settings.layout else spec.input_layouts
    if settings.layout and settings.layout not in spec.input_layouts:
        raise unknown(f"layout of {spec.name}", settings.layout, spec.input_layouts)
    rows, lacking = list(rows), dict[str, None]()
    routing = (settings.routing or "jagged") if spec.routed else "none"
    facts = (fp8_dtype if spec.uses_fp8 else "", mode, settings.seed)
    result = dict.fromkeys(
        Problem(spec.name, shape, routing, layout, dtype, *facts)
        for row in rows
        for shape in _shapes(spec, row, lacking)
        if all(shape.get(name, row.get(name)) == value for name, value in size.items())
        for layout in layouts
        for dtype in in_dtypes
    )
    if not result and size and not lacking:
        raise UsageError(f"the shapes hold no problem for {spec.name} with {NamedInts(size)}: leave a size out")
    if not result:
        dims = ", ".join(dict.fromkeys(dim for row in rows for dim in row))
        reason = f"ask for {', '.join(lacking)}, and the shapes have {dims}" if lacking else "are none"
        fix = "give others with --shapes"
        raise UsageError(f"the shapes hold no problem for {spec.name}: its problems {reason}; {fix}")
    for problem in result:
        check_size(spec, problem)
    return list(result)


def _shapes(spec: KernelSpec, row: Mapping[str, int], lacking: dict[str, None]) -> list[NamedInts]:
    """Return the shapes of a row up to the first that needs a dim which the row lacks; that goes into ``lacking``."""
    shapes: list[NamedInts] = []
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the spec's function may print
            for shape in spec.problems(row):
                if not isinstance(shape, NamedInts) or not shape or not all(map(_is_size, shape.items())):
                    raise UsageError(f"problems of kernel {spec.name!r} gives {shape!r:.80}: yield NamedInts of sizes")
                shapes.append(shape)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        dim = error.args[0] if isinstance(error, KeyError) and len(error.args) == 1 else None
        if not isinstance(dim, str) or not NAME.fullmatch(dim) or dim in row:
            raise in_spec(spec.name, "problems", spec.problems, error) from error
        lacking[dim] = None
    return shapes


def _is_size(item: tuple[str, int]) -> bool:
    name, size = item
    return bool(NAME.fullmatch(name)) and not keyword.iskeyword(name) and type(size) is int and 0 <= size < 2**63


def check_shape(spec: KernelSpec, problem: Problem) -> None:
    """Raise UsageError for a problem size that lacks a dim of the lookup key, or whose size is impossible."""
    dims = {name.removesuffix("_bucket") for name in spec.key} - {LAYOUT_FLAG, DTYPE_FLAG}
    if missing := sorted(dims - {*problem.shape}):
        raise UsageError(f"{spec.name} needs {missing[0]}, which the shape {problem.shape} lacks")
    check_size(spec, problem)


def check_size(spec: KernelSpec, problem: Problem) -> None:
    """Raise UsageError for a problem size that moves no bytes, or more than any memory holds."""
    shape = problem.shape
    try:
        bytes_moved = spec.bytes_of(problem)
    except KeyError as error:
        missing = str(error.args[0] if error.args else "a dim")[:80]
        raise UsageError(f"{spec.name} needs {missing}, which the shape {shape} lacks") from None
    if bytes_moved < 1:
        raise UsageError(f"{spec.name} {shape} moves nothing: give each dim a size of at least 1")
    if bytes_moved > LARGEST_BYTES:
        raise UsageError(f"{spec.name} {shape} moves {bytes_moved:,} bytes: no device has more than {LARGEST_BYTES:,}")


def scaled_down(spec: KernelSpec, full_size: Iterable[Problem]) -> list[Problem]:
    """Return the problem sizes as small as Triton's interpreter needs them, each once."""
    small = list(dict.fromkeys(map(spec.scaled_down, full_size)))
    if wrong := [problem for problem in small if not isinstance(problem, Problem)]:
        raise UsageError(f"scaled_down of kernel {spec.name!r} gives {wrong[0]!r:.80}: return a Problem")
    return small


def seed_text(problem: Problem) -> str:
    """Return the text that seeds every permutation and simulated time of a problem size. It must never change.

    It is what ``repr`` gave at first. A field added to Problem enters it only with another value than its default.
    """
    return (
        f"Problem(kernel={problem.kernel!r}, shape=NamedInts({problem.shape}), routing={problem.routing!r}, "
        f"input_layout={problem.input_layout!r}, in_dtype={problem.in_dtype!r}, fp8_dtype={problem.fp8_dtype!r}, "
        f"scale_mode={problem.scale_mode!r}, seed={problem.seed})"
    )
