"""Formats of others. An entry point in the group ``fp8tune.formats`` that names a :class:`Format` adds one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import cast

from fp8tune.errors import UsageError, one_line, unknown
from fp8tune.tables.files import File
from fp8tune.tables.picks import KernelPicks

GROUP = "fp8tune.formats"
DIFF = "diff"  # the format that changes a source file
_SHIPPED = {
    DIFF: "diff:FORMAT",
    "python": "python_file:FORMAT",
    "triton-cache": "triton_cache:FORMAT",
    "vllm": "by_size:VLLM",
    "sglang": "by_size:SGLANG",
    "hf": "by_size:HUGGING_FACE",
}  # modules are imported on demand: one of them needs Triton


@dataclass(frozen=True)
class Options:
    """Options that a format may use."""

    sizes: Mapping[str, str | int] = field(default_factory=dict)  # size in a file name -> dim of the kernel, or number
    dtype: str | None = None  # as file names call it
    within: float = 0.02  # share of the best time that a problem may lose by having fewer configs
    notice: Callable[[str], object] = lambda message: None  # gets one line for each launch that is left out


@dataclass(frozen=True)
class Format:
    """One format."""

    write: Callable[[Sequence[KernelPicks], Options], Sequence[File]]
    """Function from the picks of one kernel to files. It raises UsageError for picks that the format cannot hold."""
    next: str
    """One line on the use of the files. ``{folder}`` is where they are, ``{device}`` the first folder below."""
    options: tuple[str, ...] = ()  # names of the options that it uses
    has_all_devices: bool = False  # True if it takes the picks of all devices of an arch, False for those of one


def names() -> list[str]:
    """Return the names of all formats."""
    return [*_SHIPPED, *sorted(set(metadata.entry_points(group=GROUP).names) - set(_SHIPPED))]


def load(name: str) -> Format:
    """Import a format. Raises UsageError if there is no such format, or it cannot be imported."""
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


def check_options(name: str, options: Collection[str], kernels: Sequence[str]) -> None:
    """Raise UsageError for an option that a format does not use, and for any number of kernels but one."""
    for option in options:
        if option not in load(name).options:
            raise UsageError(f"--{option.removesuffix('s')} does not go with --for {name}: leave it out")
    if len(kernels) != 1:
        raise UsageError(f"--for {name} writes the picks of one kernel: name it with --kernel")
