"""``fp8tune export``."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from fp8tune.commands.options import opened_to_read
from fp8tune.errors import UsageError
from fp8tune.options import Group, Kernels, Names, Option, ReadDatabase, TableFormat, examples, module_path


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
            "Who reads it: diff (of the kernel's configs=[...]), python (a file of its own), triton-cache, vllm, "
            "sglang, hf (Hugging Face kernels), or a format that an installed package adds.",
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
            "With --for vllm, sglang or hf: what a size of their file names is, NAME=DIM or NAME=NUMBER, such as "
            "M=num_tokens or E=8. Repeatable.",
            placeholder="NAME=SIZE",
        ),
    ] = ()
    dtype: Annotated[
        str | None,
        Option(
            "--dtype",
            "With --for vllm or sglang: what their file names call the dtype, such as fp8_w8a8; by the input's.",
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
    ("Files that vLLM reads", "fp8tune export --for vllm --arch sm_90 --kernel moe:fused --output configs"),
)
def export(options: ExportOptions) -> None:
    """Write the best configs of an arch, for our kernels or others.

    Needs no GPU.

    With --for FORMAT the picks of one --kernel are written as others read them. For a recorded
    kernel one of the formats is a diff of its own configs=[...].

    Without --for they are merged into a Python module. In a checkout of fp8tune that is the shipped table; elsewhere it
    is your own, which lookups read first: in the folder that FP8TUNE_TABLES names, or ~/.local/share/fp8tune/tables.
    Rows of kernels and devices that the database does not know stay.

    Prints what the config for any other shape loses where it was chosen and, each shape left out in turn, on shapes
    held out; beside it what the nearest key's row loses there. Kernels with which that is less go by the nearest key;
    what the committed table has them go by stays until the other is proven to lose less.
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
    from fp8tune import names
    from fp8tune.exporting import select_rows
    from fp8tune.render import contracts, trust
    from fp8tune.render.terminal import notice, path_here, print_json
    from fp8tune.tables.current import INSTALLED, SHIPPED
    from fp8tune.tables.launch_table import default_path, shipped_path
    from fp8tune.tables.merge import merge_file

    arch, output = options.arch, module_path(options.output)
    if options.kernels and output is None:
        raise UsageError("--kernel makes a table of that kernel alone: say where with --output PATH")
    with opened_to_read(options.db) as (store, _):
        names.check_arch(arch, store)
        path = output or default_path(arch)
        kernels = names.stored_kernels(options.kernels, store) if options.kernels else ()
        is_own = output is None and path != shipped_path(arch)
        tables = INSTALLED if is_own else SHIPPED
        selection = select_rows(store, arch, kernels, tables)
    if not selection.table.entries and not (options.check and selection.known):
        reason = selection.notices[0] if selection.notices else "run fp8tune sweep, or name another with --db"
        raise UsageError(f"the database has nothing to export for {arch}: {reason}")
    notice(*trust.export_notices(selection.notices, options.verbose))
    merged, is_changed = merge_file(path, selection, prune=options.prune or options.check, is_dry=options.check)
    state = ("stale" if is_changed else "up to date") if options.check else "written" if is_changed else "unchanged"
    if options.json:
        print_json(contracts.exported_table(str(path), state, merged))
    elif state == "stale":
        print(f"{path_here(path)}: stale, run fp8tune export --arch {arch}{' --prune' if merged.removed else ''}")
    else:
        print(f"{path_here(path)}: {state}{'' if options.check else f': {trust.export_changes(merged)}'}")
    if options.check:
        raise typer.Exit(int(is_changed))
    notice(*trust.export_losses(merged))
    if not options.json:
        trust.print_robust(selection.fallbacks, merged.table.nearest)


def _export_for(options: ExportOptions, name: str) -> None:
    from fp8tune.exporting import format_files, read_for_format
    from fp8tune.render import given as render_given
    from fp8tune.render.terminal import notice, print_json
    from fp8tune.tables import files
    from fp8tune.tables.formats import DIFF, Options, check_options, diff, load
    from fp8tune.tables.formats.by_size import parse_sizes

    output = options.output
    if options.prune:
        raise UsageError("--prune is for the table: leave it out with --for")
    requested = {"sizes": options.sizes, "dtype": options.dtype, "within": options.within}
    check_options(name, [option for option, value in requested.items() if value not in (None, ())], options.kernels)
    if name == DIFF and output is None and options.check:
        raise UsageError("--check compares with a file: name the one that holds the diff with --output FILE")
    if name == DIFF and output is not None and output.is_dir():
        raise UsageError(f"{output} is a folder: name the file of the diff, such as {output / 'configs.diff'}")
    with opened_to_read(options.db) as (store, _):
        picks = read_for_format(store, options.arch, options.kernels, options.device, name)
    kernel, shrunk, folder = picks[0].kernel, None, output or Path()
    notice(*(f"{kernel}: {line}" for one in picks for line in one.notices))
    within = Options.within if options.within is None else options.within
    if name == DIFF:
        shrunk = diff.shrink(picks[0], within)
        notice(*(f"{kernel}: {line}" for line in shrunk.notes))
        texts = (shrunk.diff, render_given.markdown(shrunk))
        if output is None and not options.json:
            print("\n".join(filter(None, texts)), end="")
            notice(f"next: {load(name).next}")
            return
        folder = output.parent if output else folder
        ends = zip(("", ".md"), texts, strict=True)
        written = [files.File(PurePosixPath(output.name + end), text) for end, text in ends] if output else []
    else:
        written = format_files(picks, name, Options(parse_sizes(options.sizes), options.dtype, within, notice))
    first = written[0].path.parts[0] if written else ""
    next = load(name).next.format(folder=folder, device=first).replace("FILE", str(output or "FILE"))
    state = "stale" if options.check else "would be written" if options.dry else "written"
    states = {
        path: state if is_changed else "unchanged"
        for path, is_changed in files.write(written, folder, is_dry=state != "written").items()
    }
    if options.json:
        print_json(render_given.summary(picks, name, states, next, shrunk))
    else:
        for path, text in states.items():
            print(f"{path}: {text}")
        if state == "written":
            print(f"next: {next}")
    if options.check and "stale" in states.values():
        raise typer.Exit(1)
