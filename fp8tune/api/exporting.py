"""``fp8tune.export``: what a table or a file of another tool would say, as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fp8tune import names
from fp8tune.api.results import Names, Results, open, several
from fp8tune.errors import UsageError
from fp8tune.exporting import format_files, read_for_format, select_rows
from fp8tune.measure.device import probe
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
    results = db if isinstance(db, Results) else open(db)
    options, requested = parse_options([f"{name}={value}" for name, value in (sizes or {}).items()], within)
    if format != "table":
        check_options(format, requested, several(kernel))
        with results.reading() as reader:
            picks = read_for_format(
                reader, arch, several(kernel), allow_quick=allow_quick, here=probe(), same_bits=same_bits
            )
        written, notices = format_files(picks, format, options)
        return Export({str(file.path): file.text for file in written}, tuple(notices))
    if requested:
        raise UsageError(f"{requested[0]} goes with a format: name one, or leave it out")
    with results.reading() as reader:
        names.check_arch(arch, reader)
        kernels = names.stored_kernels(several(kernel), reader) if kernel else ()
        here = probe()
        selection = select_rows(reader, arch, kernels, allow_quick=allow_quick, here=here, same_bits=same_bits)
    if not selection.table.entries:
        why = "no pick is proven, open or published; sweep on such a GPU, or pass allow_quick=True"
        raise UsageError(f"nothing to export for {arch}: {selection.notices[0] if selection.notices else why}")
    return Export({f"{arch}.py": selection.table.render()}, selection.notices)
