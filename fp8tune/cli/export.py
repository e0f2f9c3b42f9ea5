"""``fp8tune export``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from fp8tune import names
from fp8tune.cli import databases
from fp8tune.errors import UsageError
from fp8tune.exporting import format_files, own_kernels, read_for_format, select_rows, shipped_tables
from fp8tune.measure.device import probe
from fp8tune.measure.programs import compile_ahead
from fp8tune.options import ExportOptions
from fp8tune.output.tables import notice, warning
from fp8tune.output.text import counted, path_here
from fp8tune.store.layers import Reader
from fp8tune.tables import files
from fp8tune.tables.current import INSTALLED, SHIPPED
from fp8tune.tables.formats import DIFF, TRITON_CACHE, check_options, load, parse_options
from fp8tune.tables.launch_table import default_path, shipped_path
from fp8tune.tables.merge import merge_file
from fp8tune.tables.picks import KernelPicks
from fp8tune.tables.select import Selection
from fp8tune_kernels.arches import ARCHES


def export(options: ExportOptions) -> int:
    """Write a table or the files of a format. Exit code 1: ``--check`` found one that is out of date."""
    output = None if options.output is None else Path(options.output)
    if options.format is not None:
        return _export_for(options, options.format, output)
    for flag, is_given in (("--size", options.size), ("--within", options.within is not None)):
        if is_given:
            raise UsageError(f"{flag} goes with --for FORMAT: name a format, or leave it out")
    if options.kernel and output is None:
        raise UsageError("--kernel makes a table of that kernel alone: name its file with -o PATH")
    return _export_table(options, output)


def _export_table(options: ExportOptions, output: Path | None) -> int:
    _refuse_folder(output, "the module to write", "sm_90.py")
    with databases.opened(options.db) as (store, _):
        arch = _arch(options, store)
        if arch == "simulated" and output is None:
            raise UsageError("simulated picks are not for lookups: name a file for them with -o PATH")
        path = output or default_path(arch)
        kernels = names.stored_kernels(options.kernel, store) if options.kernel else []
        is_own = output is None and path != shipped_path(arch)
        if is_own and options.db is None:  # kernels without own results are in the shipped table already
            kernels = own_kernels(store, arch)
            if not kernels:
                print(f"{arch}: no results of your own; kernels read {path_here(shipped_path(arch))}")
                return 0
        quick, same = options.allow_quick, options.same_bits
        if path == shipped_path(arch):  # for other machines, too, so nothing is stale here
            tables = shipped_tables(store, arch, kernels, allow_quick=quick, same_bits=same)
        else:
            current = INSTALLED if is_own else SHIPPED
            selection = select_rows(store, arch, kernels, current, allow_quick=quick, here=probe(), same_bits=same)
            tables = iter([(path, selection)])
        return max([_export_rows(options, path, selection) for path, selection in tables])


def _export_rows(options: ExportOptions, path: Path, selection: Selection) -> int:
    """Merge rows into a module; return the exit code."""
    arch = selection.table.arch
    if not selection.table.entries and not (options.check and selection.known):
        why = "no pick is proven, open or published; sweep on such a GPU, or add --allow-quick"
        raise UsageError(f"nothing to export for {arch}: {selection.notices[0] if selection.notices else why}")
    warning(selection.notices)
    merged, is_changed = merge_file(path, selection, is_dry=options.check)
    if options.check and is_changed:
        rows, place = len(merged.added) + len(merged.changed), path_here(path)
        command = f"fp8tune export --arch {arch}{'' if options.output is None else f' -o {place}'}"
        print(f"{place} is out of date ({rows} rows differ): run {command}")
        return 1
    counts = f"{len(merged.added)} rows added, {len(merged.changed)} changed, {len(merged.unchanged)} unchanged"
    state = "up to date" if options.check else f"written: {counts}" if is_changed else "unchanged"
    print(f"{path_here(path)}: {state}")
    return 0


def _export_for(options: ExportOptions, name: str, output: Path | None) -> int:
    form, requested = parse_options(options.size, options.within)
    check_options(name, requested, options.kernel)
    diff, folder = output if name == DIFF else None, output or Path()
    if name == DIFF:
        if output is None and options.check:
            raise UsageError("--check compares with a file: name the one that holds the diff with -o FILE")
        _refuse_folder(output, "the file of the diff", "configs.diff")
    with databases.opened(options.db) as (store, _):
        arch, quick, same = _arch(options, store), options.allow_quick, options.same_bits
        picks = read_for_format(store, arch, options.kernel, allow_quick=quick, here=probe(), same_bits=same)
    is_compiled = name == TRITON_CACHE and not options.check and _compile_ahead(picks, folder)
    try:
        written, notices = format_files(picks, name, form)
    except UsageError as error:
        if not is_compiled:
            raise
        written, notices = [], [f"Triton will tune at run time, but finds its programs compiled: {error}"]
    warning(notices)
    if diff is not None:
        written, folder = [files.File(PurePosixPath(diff.name), written[0].text)], diff.parent
    if name == DIFF and diff is None:
        print(written[0].text, end="")
    else:
        changed = files.write(written, folder, is_dry=options.check)
        for path, is_changed in changed.items():
            state = "out of date" if options.check else "written"
            print(f"{path_here(path)}: {state if is_changed else 'unchanged'}")
        if options.check:
            return int(any(changed.values()))
    if written:
        step = load(name).next.format(folder=folder, device=written[0].path.parts[0])
        notice(f"next: {step.replace('FILE', str(output or 'FILE'))}")
    return 0


def _refuse_folder(output: Path | None, file: str, example: str) -> None:
    if output is not None and (output.is_dir() or not output.name):
        raise UsageError(f"{output} is a folder: name {file}, such as {output / example}")


def _compile_ahead(kernels: Sequence[KernelPicks], folder: Path) -> bool:
    """Compile the picks of recorded kernels into Triton's cache of each device; return True if any was compiled."""
    from fp8tune.tables.formats.triton_cache import folder_of  # imports Triton

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
    """Return the arch to export: the only one that has rows of the kernels, if none is named. Raises UsageError."""
    if options.arch is not None:
        names.check_arch(options.arch, store)
        return options.arch
    kernels = names.stored_kernels(options.kernel, store)
    arches = {study.device.arch for study in store.pools() if study.problem.kernel in kernels}
    on_gpus = sorted(arches - {"interpreter", "simulated"})
    what = " and ".join(kernels) if options.kernel else "the database"
    if not on_gpus:
        simulated = "; --arch simulated exports its simulated times" if "simulated" in arches else ""
        raise UsageError(f"nothing to export: {what} has no results of a GPU: run fp8tune sweep on one{simulated}")
    if len(on_gpus) > 1:
        raise UsageError(f"--arch is missing: {what} has {' and '.join(on_gpus)}, name one of them")
    return on_gpus[0]
