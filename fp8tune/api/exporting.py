"""``fp8tune.export`` and ``fp8tune.lookup``: configs for tables and files of other tools, and for a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from fp8tune import names
from fp8tune.api.results import Names, Results, open, several
from fp8tune.errors import MachineError, UsageError
from fp8tune.exporting import format_files, read_for_format, select_rows
from fp8tune.filters import WORDS, Filters
from fp8tune.lookups import Lookup as Lookup
from fp8tune.lookups import look_up
from fp8tune.measure.device import probe
from fp8tune.plan.problems import check_shape
from fp8tune.records import Device, Problem
from fp8tune.replay.loading import load_spec
from fp8tune.tables import files
from fp8tune.tables.formats import check_options, parse_options


@dataclass(frozen=True)
class Export:
    """Files of an export. ``str()`` is the text of the first."""

    files: Mapping[str, str]
    """Path below a folder -> text."""
    notices: tuple[str, ...] = ()
    """What was left out and why, one line each."""

    def __str__(self) -> str:
        return next(iter(self.files.values()))

    def write(self, folder: str | Path) -> list[Path]:
        """Write the files below a folder, each whole or not at all, and return their paths."""
        exported = [files.File(PurePosixPath(path), text) for path, text in self.files.items()]
        return list(files.write(exported, Path(folder)))


def export(
    arch: str,
    kernel: Names = None,
    *,
    format: str = "table",
    sizes: Mapping[str, str | int] | None = None,
    within: float | None = None,
    allow_quick: bool = False,
    same_bits: str | None = None,
    db: str | Path | Results | None = None,
) -> Export:
    """Render the best configs as text: `.files` maps paths to text, `.write(folder)` stores them.

    Args:
        arch: GPU arch, such as ``sm_90``.
        kernel: Kernels of the table, None for all; a format other than ``table`` takes one.
        format: ``table``, or a format of ``fp8tune export --for``.
        sizes: For vllm, sglang and hf: sizes in file names, such as ``{"M": "num_tokens", "E": 8}``.
        within: For diff: slowdown allowed for fewer configs; 0.02 by default.
        allow_quick: Also export picks that were not confirmed.
        same_bits: Size such as ``M`` at all of whose values the picks' outputs have the same bits.
        db: A database as :func:`open` takes it, or its result.

    Raises:
        UsageError: A name is unknown, or there is nothing to export.
    """
    results, kernels, here = db if isinstance(db, Results) else open(db), several(kernel), probe()
    options, requested = parse_options([f"{name}={value}" for name, value in (sizes or {}).items()], within)
    if format != "table":
        check_options(format, requested, kernels)
        with results.reading() as reader:
            picks = read_for_format(reader, arch, kernels, allow_quick=allow_quick, here=here, same_bits=same_bits)
        written, notices = format_files(picks, format, options)
        return Export({str(file.path): file.text for file in written}, tuple(notices))
    if requested:
        raise UsageError(f"{requested[0]} goes with a format: name one, or leave it out")
    with results.reading() as reader:
        names.check_arch(arch, reader)
        stored = names.stored_kernels(kernels, reader) if kernels else ()
        selection = select_rows(reader, arch, stored, allow_quick=allow_quick, here=here, same_bits=same_bits)
    if not selection.table.entries:
        why = "no pick is proven, open or published; sweep on such a GPU, or pass allow_quick=True"
        raise UsageError(f"nothing to export for {arch}: {selection.notices[0] if selection.notices else why}")
    return Export({f"{arch}.py": selection.table.render()}, selection.notices)


def lookup(
    kernel: str, size: str | Mapping[str, int | str], *, arch: str | None = None, device: str | None = None
) -> Lookup:
    """Return the config that a launch would use, and the table and row that have it.

    Imports torch and the kernel.

    Args:
        kernel: A name, ``module:SPEC`` or ``path.py:SPEC``.
        size: The kernel's own sizes, such as ``"M=16640 K=5120 G=16"``, with ``layout`` and ``dtype`` if they matter.
        arch: Arch of the launch; None for this machine's GPU.
        device: Name of a GPU of that arch; None for rows that hold for all of them.

    Raises:
        UsageError: A name is unknown, or the size lacks what the key needs.
        MachineError: There is no GPU here, and no arch is given.
    """
    if arch is not None:
        names.check_arch(arch)
        where = Device(arch, device or "")
    elif (here := probe()) is not None:
        where = Device(here.arch, here.name if device is None else device)
    else:
        raise MachineError("there is no GPU here to look up a config for: name an arch, such as arch='sm_90'")
    spec, filters = load_spec(kernel), Filters.parse(size)
    facts: dict[str, Any] = {"input_layout": "contiguous", "in_dtype": spec.in_dtypes[0], **filters.words}
    for word, known in (("layout", spec.input_layouts), ("dtype", spec.in_dtypes)):
        if (text := facts[WORDS[word]]) not in known:
            raise UsageError(f"{spec.name} has no {word} {text!r:.80}: it has {', '.join(known)}")
    problem = replace(Problem(spec.name, filters.size), **facts)
    check_shape(spec, problem)
    return look_up(spec, where, spec.lookup_key(problem))
