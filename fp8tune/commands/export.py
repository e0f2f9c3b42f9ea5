"""``fp8tune export``."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from fp8tune.commands.options import opened_to_read
from fp8tune.errors import UsageError
from fp8tune.options import Group, Kernels, Names, Option, ReadDatabase, TableFormat, examples, module_path

if TYPE_CHECKING:
    from fp8tune.export.given import Given


def percent(text: str | float) -> float:
    """A share: 0.02 for ``2%``. Raises ValueError for what is no percentage from 0 to 100."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", str(text).strip())
    with contextlib.suppress(ValueError):
        share = float(found[1]) / 100 if found else float(text)
        if 0 <= share <= 1 and (found or isinstance(text, float)):
            return share
    raise ValueError(f"{text!r} is no percentage: give one such as 2%")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of ``export``."""

    arch: Annotated[str, Option("--arch", "The GPU arch to export, such as sm_90.", completes=Names.ARCH)]
    kernels: Kernels = ()
    format: Annotated[
        str | None,
        Option(
            "--for",
            "Who reads it: triton-cache, python (a file of its own), json (Hugging Face kernels), vllm "
            "(SGLang too), fla (flash-linear-attention), diff (of the kernel's configs=[...]), or t4.",
            placeholder="FORMAT",
        ),
    ] = None
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "Where the module goes; with --for the folder of the files, with --for diff the file.",
            "fp8tune_kernels/tables/ARCH.py in a checkout, else the folder of FP8TUNE_TABLES; with --for this folder, "
            "with --for diff stdout",
            group=Group.OUTPUT,
            placeholder="PATH",
        ),
    ] = None
    device: Annotated[
        str | None, Option("--device", "With --for: the device, where an arch has several.", placeholder="NAME")
    ] = None
    sizes: Annotated[
        tuple[str, ...],
        Option(
            "--size",
            "With --for json or vllm: what a size of their file names is, NAME=DIM or NAME=NUMBER, such as "
            "M=num_tokens or E=8. Repeatable.",
            placeholder="NAME=SIZE",
        ),
    ] = ()
    dtype: Annotated[
        str | None,
        Option(
            "--dtype",
            "With --for vllm: what their file names call the dtype, such as fp8_w8a8; by the input's.",
            placeholder="NAME",
        ),
    ] = None
    within: Annotated[
        float | None,
        Option("--within", "With --for diff: how much slower fewer configs may make a problem.", "2%", parse=percent),
    ] = None
    check: Annotated[
        bool, Option("--check", "Write nothing; exit 1 if the table or a file is stale.", group=Group.OUTPUT)
    ] = False
    dry: Annotated[
        bool, Option("--dry", "With --for: write nothing, say what would be written.", group=Group.OUTPUT)
    ] = False
    output_format: Annotated[TableFormat, Option("--format", "table, or json: a summary.", group=Group.OUTPUT)] = (
        TableFormat.TABLE
    )
    prune: Annotated[
        bool,
        Option("--prune", "Remove rows of kernels and devices of the database that it does not give."),
    ] = False
    verbose: Annotated[bool, Option("--verbose", "Every notice, where there are many alike.", group=Group.OUTPUT)] = (
        False
    )
    db: ReadDatabase = None

    @property
    def json(self) -> bool:
        """Whether a summary is printed as JSON."""
        return self.output_format is TableFormat.JSON


@examples(
    ("Merge the best configs into the table that our kernels read", "fp8tune export --arch sm_90"),
    ("In CI: exit code 1 if the table is stale", "fp8tune export --arch sm_90 --check --db results.db"),
    ("A diff of your kernel's configs=[...]", "fp8tune export --for diff --arch sm_90 --kernel module:kernel"),
    ("Files that vLLM reads", "fp8tune export --for vllm --arch sm_90 --kernel colwise --size E=8 --output configs"),
)
def export(options: ExportOptions) -> None:
    """Write the best configs of an arch, for our kernels or others.

    Needs no GPU.

    With --for FORMAT the picks of one --kernel are written as others read them, with their evidence. For a recorded
    kernel one of the formats is a diff of its own configs=[...].

    Without --for they are merged into a Python module. In a checkout of fp8tune that is the shipped table; elsewhere it
    is your own, which lookups read first: in the folder that FP8TUNE_TABLES names, or ~/.local/share/fp8tune/tables.
    Rows of kernels and devices that the database does not know stay.

    Prints what the config for any other shape loses where it was chosen and, each shape left out in turn, on shapes
    held out; beside it what the nearest key's row loses there. Kernels with which that is less go by the nearest key;
    what the committed table has them go by stays until the other is proven to lose less. The JSON beside the module has
    both shape by shape.
    """
    if options.format is not None:
        _export_for(options, options.format)
        return
    given = {
        "--device": options.device is not None,
        "--size": bool(options.sizes),
        "--dtype": options.dtype is not None,
        "--within": options.within is not None,
        "--dry": options.dry,
    }
    for flag in (flag for flag, is_given in given.items() if is_given):
        raise UsageError(f"{flag} goes with --for FORMAT: name a format, or leave it out")
    _export_table(options)


def _export_table(options: ExportOptions) -> None:
    from fp8tune import adapter
    from fp8tune.export import merging, selecting
    from fp8tune.export import table as exporting
    from fp8tune.render import contracts
    from fp8tune.render import terminal as render
    from fp8tune.render import trust as render_trust
    from fp8tune.store import names

    arch, output = options.arch, module_path(options.output)
    if options.kernels and output is None:
        raise UsageError("--kernel makes a table of that kernel alone: say where with --output PATH")
    with opened_to_read(options.db) as (store, _):
        names.check_arch(arch, store)
        wanted = names.stored_kernels(options.kernels, store) if options.kernels else None
        evidence = selecting.evidence_for(store, arch)
    path = output or exporting.destination(arch)
    own = output is None and path != exporting.table_path(arch)
    held = adapter.INSTALLED if own else adapter.SHIPPED
    table = exporting.render(evidence, arch, kernels=wanted, tables=held)
    if not table.entries and not (options.check and table.known):
        why = table.notices[0] if table.notices else "run fp8tune sweep, or name another with --db"
        raise UsageError(f"the database has nothing to export for {arch}: {why}")
    existing = merging.existing(path)
    for line in render_trust.export_notices(table.notices, options.verbose):
        render.notice(line)
    merged = merging.merge(existing, table, prune=options.prune or options.check)
    if options.check:
        stale = exporting.stale(merged.table, path)
        again = f"stale, run fp8tune export --arch {arch}{' --prune' if merged.removed else ''}"
        if options.json:
            state = "stale" if stale else "up to date"
            render.print_json(contracts.exported_table(str(path), state, merged))
        else:
            print(f"{render.path_here(path)}: {again if stale else 'up to date'}")
        raise typer.Exit(1 if stale else 0)
    if own:
        exporting.make_folder(path.parent)
    written = "written" if exporting.write(merged.table, path) else "unchanged"
    if not options.json:
        print(f"{render.path_here(path)}: {written}: {render_trust.export_changes(merged)}")
    for line in render_trust.export_losses(merged):
        render.notice(line)
    if options.json:
        render.print_json(contracts.exported_table(str(path), written, merged))
        return
    render_trust.print_robust(table.robust, merged.table.nearest)


def _check_options_of(name: str, options: ExportOptions) -> None:
    """Raise UsageError for an option that does not go with a format."""
    from fp8tune.export import asked
    from fp8tune.export.formats.known import DIFF

    output = options.output
    if options.prune:
        raise UsageError("--prune is for the table: leave it out with --for")
    given = {"sizes": bool(options.sizes), "dtype": options.dtype is not None, "within": options.within is not None}
    asked.check_options(name, options.kernels, **given)
    if name == DIFF and output is None and options.check:
        raise UsageError("--check compares with a file: name the one that holds the diff with --output FILE")
    if name == DIFF and output is not None and output.is_dir():
        raise UsageError(f"{output} is a folder: name the file of the diff, such as {output / 'configs.diff'}")


def _givens(options: ExportOptions, name: str) -> list[Given]:
    """The picks, for each device that the format holds; says what was left out."""
    from fp8tune.export import asked
    from fp8tune.render.terminal import notice

    with opened_to_read(options.db) as (store, _):
        found = asked.givens(store, options.arch, options.kernels, options.device, name)
    notice(*(f"{found[0].kernel}: {line}" for one in found for line in one.notices))
    return found


def _export_for(options: ExportOptions, name: str) -> None:
    from fp8tune.export import asked, files
    from fp8tune.export.formats import diff
    from fp8tune.export.formats.known import DIFF, known
    from fp8tune.export.given import File
    from fp8tune.render import given as render_given
    from fp8tune.render.terminal import notice, print_json

    wanted, output = known(name), options.output
    _check_options_of(name, options)
    givens = _givens(options, name)
    kernel, shrunk = givens[0].kernel, None
    if name == DIFF:
        shrunk = diff.shrink(givens[0], asked.DEFAULT_WITHIN if options.within is None else options.within)
        notice(*(f"{kernel}: {line}" for line in shrunk.notes))
        texts = (shrunk.diff, render_given.markdown(shrunk))
        if output is None and not options.json:
            print("\n".join(filter(None, texts)), end="")
            notice(f"next: {wanted.next}")
            return
        folder, file = (output.parent, output.name) if output is not None else (Path(), "")
        made = [
            File(PurePosixPath(file + suffix), text) for suffix, text in zip(("", ".md"), texts, strict=True) if file
        ]
    else:
        folder = output or Path()
        made = asked.files(givens, name, options.sizes, options.dtype, notice)
    placed = files.placed(made, folder)
    first = made[0].path.parts[0] if made else ""
    next = wanted.next.format(folder=folder, device=first).replace("FILE", str(output or "FILE"))
    state = "stale" if options.check else "would be written" if options.dry else "written"
    if state == "written":
        files.write(placed)
    if options.json:
        print_json(render_given.summary(givens, name, placed, state, next, shrunk))
    else:
        for one in placed:
            print(f"{one.path}: {state if one.is_stale else 'unchanged'}")
        if state == "written":
            print(f"next: {next}")
    if options.check and any(one.is_stale for one in placed):
        raise typer.Exit(1)
