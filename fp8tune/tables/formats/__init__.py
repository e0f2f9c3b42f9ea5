"""Formats for other tools. A package adds a :class:`Format` with an entry point in the group ``fp8tune.formats``."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import cast

from fp8tune.errors import UsageError, one_line, unknown
from fp8tune.tables.files import File
from fp8tune.tables.picks import KernelPicks
from fp8tune.text import NAME, visible

GROUP = "fp8tune.formats"
DIFF = "diff"  # the format that changes a source file
TRITON_CACHE = "triton-cache"  # the format that compiled programs go with
_SHIPPED = {
    DIFF: "diff:FORMAT",
    "python": "python_file:FORMAT",
    TRITON_CACHE: "triton_cache:FORMAT",
    "vllm": "by_size:VLLM",
    "sglang": "by_size:SGLANG",
    "hf": "by_size:HUGGING_FACE",
}  # modules are imported on demand: one of them needs Triton
_SIZE = re.compile(rf"{NAME.pattern}(/[1-9][0-9]{{0,8}})?|[0-9]{{1,18}}")


@dataclass(frozen=True)
class Options:
    """Options of an export. Each format uses only some of them."""

    sizes: Mapping[str, str | int] = field(default_factory=dict)
    """Size in a file name -> dim of the kernel, or number; ``dtype`` -> name of the dtype in file names."""
    within: float = 0.02  # largest slowdown that fewer configs may cause on a problem; 0.02 is 2 %
    notice: Callable[[str], object] = lambda message: None  # receives one line per omitted launch


@dataclass(frozen=True)
class Format:
    """Export format for another tool."""

    write: Callable[[Sequence[KernelPicks], Options], Sequence[File]]
    """Function that returns the files for one kernel. It raises UsageError for picks that the format cannot express."""
    next: str
    """Hint for using the files. ``{folder}`` is the output folder, ``{device}`` the first folder below it."""
    options: tuple[str, ...] = ()  # names of the :class:`Options` fields that the format uses
    has_all_devices: bool = False  # True if ``write`` takes all devices of an arch, False if only one


def names() -> list[str]:
    """Return the names of all formats, those of other packages last."""
    return [*_SHIPPED, *sorted(set(metadata.entry_points(group=GROUP).names) - set(_SHIPPED))]


def load(name: str) -> Format:
    """Import a format by name. Raises UsageError if the name is unknown or the import fails."""
    if name in _SHIPPED:
        module, _, attribute = _SHIPPED[name].partition(":")
        return cast(Format, getattr(importlib.import_module(f"{__name__}.{module}"), attribute))
    points = metadata.entry_points(group=GROUP, name=name)
    if not points:
        raise unknown("format", name, names())
    try:
        loaded = next(iter(points)).load()
    except Exception as error:  # code of another package
        raise UsageError(f"format {name} cannot be imported: {one_line(error)}; reinstall its package") from error
    if not isinstance(loaded, Format):
        raise UsageError(f"format {name} is no fp8tune.tables.formats.Format: correct its entry point")
    return loaded


def parse_options(size: Sequence[str], within: float | None = None) -> tuple[Options, list[str]]:
    """Read ``--size`` texts such as ``M=tokens``, ``M=rows/8`` and ``E=8``. Return options and the names of those set.

    Raises UsageError for any other text.
    """
    sizes: dict[str, str | int] = {}
    for text in size:
        name, _, value = text.partition("=")
        if not NAME.fullmatch(name) or not _SIZE.fullmatch(value):
            raise UsageError(f"--size {visible(text)!r} is no size: give NAME=DIM or NAME=NUMBER, such as M=tokens")
        sizes[name] = int(value) if value.isdigit() else value
    names = (["sizes"] if sizes else []) + (["within"] if within is not None else [])
    return Options(sizes, Options.within if within is None else within), names


def check_options(name: str, options: Collection[str], kernels: Sequence[str]) -> None:
    """Raise UsageError if the format does not use one of the options, or if there is not exactly one kernel."""
    for option in options:
        if option not in load(name).options:
            raise UsageError(f"--{option.removesuffix('s')} does not go with --for {name}: leave it out")
    if len(kernels) != 1:
        raise UsageError(f"--for {name} writes the picks of one kernel: name it with --kernel")
