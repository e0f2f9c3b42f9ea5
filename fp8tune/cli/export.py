"""``fp8tune export``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import typer

from fp8tune.cli import databases
from fp8tune.cli.adapter import command
from fp8tune.errors import UsageError
from fp8tune.options import ExportOptions

if TYPE_CHECKING:
    from fp8tune.store.layers import Reader
    from fp8tune.tables.picks import KernelPicks

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
    from fp8tune.exporting import own_kernels, select_rows
    from fp8tune.measure.device import probe
    from fp8tune.output.tables import warning
    from fp8tune.output.text import path_here
    from fp8tune.tables.current import INSTALLED, SHIPPED
    from fp8tune.tables.launch_table import default_path, shipped_path
    from fp8tune.tables.merge import merge_file

    output = None if options.output is None else Path(options.output)
    if output is not None and (output.is_dir() or not output.name):
        raise UsageError(f"{output} is a folder: name the module to write, such as {output / 'sm_90.py'}")
    if options.kernel and output is None:
        raise UsageError("--kernel makes a table of that kernel alone: name its file with -o PATH")
    with databases.opened(options.db) as (store, _):
        arch = _arch(options, store)
        if arch == "simulated" and output is None:
            raise UsageError("simulated picks are not for lookups: name a file for them with -o PATH")
        path = output or default_path(arch)
        kernels = names.stored_kernels(options.kernel, store) if options.kernel else []
        tables, is_shipped = SHIPPED, path == shipped_path(arch)
        if output is None and not is_shipped:
            tables = INSTALLED
            if options.db is None:  # kernels without own results are in the shipped table already
                kernels = own_kernels(store, arch)
                if not kernels:
                    print(f"{arch}: no results of your own; kernels read {path_here(shipped_path(arch))}")
                    return
        here = None if is_shipped else probe()  # the shipped table is for other machines, too
        selection = select_rows(
            store, arch, kernels, tables, allow_quick=options.allow_quick, here=here, same_bits=options.same_bits
        )
    if not selection.table.entries and not (options.check and selection.known):
        why = "no pick is proven, open or published; sweep on such a GPU, or add --allow-quick"
        raise UsageError(f"nothing to export for {arch}: {selection.notices[0] if selection.notices else why}")
    warning(selection.notices)
    merged, is_changed = merge_file(path, selection, is_dry=options.check)
    rows = len(merged.added) + len(merged.changed) + len(merged.removed)
    if not options.check:
        counts = f"{len(merged.added)} rows added, {len(merged.changed)} changed, {len(merged.unchanged)} unchanged"
        print(f"{path_here(path)}: {f'written: {counts}' if is_changed else 'unchanged'}")
    elif is_changed:
        place = "" if output is None else f" -o {path_here(path)}"
        print(f"{path_here(path)} is out of date ({rows} rows differ): run fp8tune export --arch {arch}{place}")
        raise typer.Exit(1)
    else:
        print(f"{path_here(path)}: up to date")


def _export_for(options: ExportOptions, name: str) -> None:
    from fp8tune.exporting import format_files, read_for_format
    from fp8tune.measure.device import probe
    from fp8tune.output.tables import notice, warning
    from fp8tune.output.text import path_here
    from fp8tune.tables import files
    from fp8tune.tables.formats import DIFF, TRITON_CACHE, check_options, load, parse_options

    output, is_diff = None if options.output is None else Path(options.output), name == DIFF
    form, requested = parse_options(options.size, options.within)
    check_options(name, requested, options.kernel)
    if is_diff and output is None and options.check:
        raise UsageError("--check compares with a file: name the one that holds the diff with -o FILE")
    if is_diff and output is not None and output.is_dir():
        raise UsageError(f"{output} is a folder: name the file of the diff, such as {output / 'configs.diff'}")
    with databases.opened(options.db) as (store, _):
        arch, quick = _arch(options, store), options.allow_quick
        kernels, same = options.kernel, options.same_bits
        picks = read_for_format(store, arch, kernels, allow_quick=quick, here=probe(), same_bits=same)
    folder = output or Path()
    is_compiled = name == TRITON_CACHE and not options.check and _compile_ahead(picks, folder)
    try:
        written, notices = format_files(picks, name, form)
    except UsageError as error:
        if not is_compiled:
            raise
        written, notices = [], [f"Triton will tune at run time, but finds its programs compiled: {error}"]
    warning(notices)
    if is_diff and output is None:
        print(written[0].text, end="")
    else:
        if is_diff and output is not None:
            written, folder = [files.File(PurePosixPath(output.name), written[0].text)], output.parent
        changed = files.write(written, folder, is_dry=options.check)
        for path, is_changed in changed.items():
            state = "out of date" if options.check else "written"
            print(f"{path_here(path)}: {state if is_changed else 'unchanged'}")
        if options.check:
            raise typer.Exit(1 if any(changed.values()) else 0)
    if not written:
        return
    step = load(name).next.format(folder=folder, device=written[0].path.parts[0]).replace("FILE", str(output or "FILE"))
    notice(f"next: {step}")


def _compile_ahead(kernels: Sequence[KernelPicks], folder: Path) -> bool:
    """Compile the picks of recorded kernels into Triton's cache of each device; return True if any was compiled."""
    from fp8tune.measure.programs import compile_ahead
    from fp8tune.output.tables import warning
    from fp8tune.output.text import counted, path_here
    from fp8tune.tables.formats.triton_cache import folder_of
    from fp8tune_kernels.arches import ARCHES

    is_compiled = False
    for kernel in kernels:
        launches = [pick for pick in kernel.picks if pick.launch is not None and kernel.recorded is not None]
        if launches and kernel.device.arch in ARCHES:
            work = [(kernel.recorded, pick.launch, kernel.triton_config(pick.config)) for pick in launches]
            place = folder / folder_of(kernel.device)
            result = compile_ahead(work, kernel.device.arch, place)  # type: ignore[arg-type]
            warning(f"not compiled: {failure}" for failure in result.failures)
            print(f"{path_here(place)}: {counted(result.launches, 'launch')} compiled in {result.seconds:.1f} s")
            is_compiled |= result.launches > 0
    return is_compiled


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
