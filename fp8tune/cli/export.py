"""``fp8tune export``."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import typer

from fp8tune.cli import databases
from fp8tune.cli.adapter import command
from fp8tune.errors import UsageError
from fp8tune.options import ExportOptions

if TYPE_CHECKING:
    from fp8tune.store.layers import Reader

EPILOG = """
$ fp8tune export --arch gfx942
$ fp8tune export --arch sm_90 --check --db results.db
$ fp8tune export --for diff --kernel ops:softmax -o softmax.diff
$ fp8tune export --for vllm --kernel moe:fused -o configs
"""


@command(ExportOptions, epilog=EPILOG)
def export(options: ExportOptions) -> None:
    """Write the best configs as a table, a diff or other formats.

    Without --for, updates the table that fp8tune-kernels reads: the committed one inside a checkout of fp8tune, else
    your own. Leaves out quick, stale and simulated picks. Needs no GPU.
    """
    if options.format is not None:
        _export_for(options, options.format)
        return
    for flag in ("--size" if options.size else "", "--within" if options.within is not None else ""):
        if flag:
            raise UsageError(f"{flag} goes with --for FORMAT: name a format, or leave it out")
    _export_table(options)


def _export_table(options: ExportOptions) -> None:
    from fp8tune import names
    from fp8tune.exporting import select_rows
    from fp8tune.render import trust
    from fp8tune.render.terminal import notice, path_here
    from fp8tune.tables.current import INSTALLED, SHIPPED
    from fp8tune.tables.launch_table import default_path, shipped_path
    from fp8tune.tables.merge import merge_file

    output = None if options.output is None else Path(options.output)
    if output is not None and (output.is_dir() or not output.name):
        raise UsageError(f"{output} is a folder: name the module to write, such as {output / 'sm_90.py'}")
    if options.kernel and output is None:
        raise UsageError("--kernel makes a table of that kernel alone: say where with -o PATH")
    with databases.opened(options.db) as (store, _):
        arch = _arch(options, store)
        path = output or default_path(arch)
        kernels = names.stored_kernels(options.kernel, store) if options.kernel else ()
        is_own = output is None and path != shipped_path(arch)
        tables = INSTALLED if is_own else SHIPPED
        selection = select_rows(store, arch, kernels, tables)
    if not selection.table.entries and not (options.check and selection.known):
        reason = selection.notices[0] if selection.notices else "run fp8tune sweep, or name another with --db"
        raise UsageError(f"the database has nothing to export for {arch}: {reason}")
    notice(*trust.export_notices(selection.notices, False))
    merged, is_changed = merge_file(path, selection, prune=options.check, is_dry=options.check)
    state = ("stale" if is_changed else "up to date") if options.check else "written" if is_changed else "unchanged"
    if state == "stale":
        print(f"{path_here(path)}: stale, run fp8tune export --arch {arch}{' --prune' if merged.removed else ''}")
    else:
        print(f"{path_here(path)}: {state}{'' if options.check else f': {trust.export_changes(merged)}'}")
    if options.check:
        raise typer.Exit(int(is_changed))
    notice(*trust.export_losses(merged))
    trust.print_robust(selection.fallbacks, merged.table.nearest)


def _arch(options: ExportOptions, store: Reader) -> str:
    """Return the arch to export: the only one of the database, if none is named. Raises UsageError."""
    from fp8tune import names

    if options.arch is not None:
        names.check_arch(options.arch, store)
        return options.arch
    arches = [arch for arch in store.arches() if arch not in ("interpreter", "simulated")]
    if len(arches) == 1:
        return arches[0]
    if not arches:
        raise UsageError("nothing to export: the database has no results of a GPU; run fp8tune sweep")
    raise UsageError(f"--arch is missing: the database has {' and '.join(arches)}, name one of them")


def _export_for(options: ExportOptions, name: str) -> None:
    from fp8tune.exporting import format_files, read_for_format
    from fp8tune.render import given as render_given
    from fp8tune.render.terminal import notice
    from fp8tune.tables import files
    from fp8tune.tables.formats import DIFF, Options, check_options, diff, load
    from fp8tune.tables.formats.by_size import parse_sizes

    output = None if options.output is None else Path(options.output)
    dtype = next((size.partition("=")[2] for size in options.size if size.startswith("dtype=")), None)
    sizes = tuple(size for size in options.size if not size.startswith("dtype="))
    requested = {"sizes": sizes, "dtype": dtype, "within": options.within}
    check_options(name, [option for option, value in requested.items() if value not in (None, ())], options.kernel)
    if name == DIFF and output is None and options.check:
        raise UsageError("--check compares with a file: name the one that holds the diff with -o FILE")
    if name == DIFF and output is not None and output.is_dir():
        raise UsageError(f"{output} is a folder: name the file of the diff, such as {output / 'configs.diff'}")
    with databases.opened(options.db) as (store, _):
        picks = read_for_format(store, _arch(options, store), options.kernel, None, name)
    kernel, shrunk, folder = picks[0].kernel, None, output or Path()
    notice(*(f"{kernel}: {line}" for pick in picks for line in pick.notices))
    within = Options.within if options.within is None else options.within
    if name == DIFF:
        shrunk = diff.shrink(picks[0], within)
        notice(*(f"{kernel}: {line}" for line in shrunk.notes))
        texts = (shrunk.diff, render_given.markdown(shrunk))
        if output is None:
            print("\n".join(filter(None, texts)), end="")
            notice(f"next: {load(name).next}")
            return
        folder = output.parent
        ends = zip(("", ".md"), texts, strict=True)
        written = [files.File(PurePosixPath(output.name + end), text) for end, text in ends]
    else:
        written = format_files(picks, name, Options(parse_sizes(sizes), dtype, within, notice))
    first = written[0].path.parts[0] if written else ""
    next_step = load(name).next.format(folder=folder, device=first).replace("FILE", str(output or "FILE"))
    state = "out of date" if options.check else "written"
    changed = files.write(written, folder, is_dry=options.check)
    for path, is_changed in changed.items():
        print(f"{path}: {state if is_changed else 'unchanged'}")
    if not options.check:
        print(f"next: {next_step}")
    elif any(changed.values()):
        raise typer.Exit(1)
