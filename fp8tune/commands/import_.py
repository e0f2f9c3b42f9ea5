"""``fp8tune import``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

from fp8tune.commands.options import database_to_write
from fp8tune.errors import UsageError
from fp8tune.options import Argument, JsonOrTable, Option, TableFormat, WrittenDatabase, examples
from fp8tune.render.terminal import notice, print_json_line
from fp8tune.text import visible


@examples(
    ("Merge another machine's rows", "fp8tune import other.db"),
    ("What Triton tuned in your programs", "fp8tune import ~/.triton/cache --kernel my-kernel"),
    ("The archive of a release", "fp8tune import results-full.db.xz"),
    ("Published rows, compiled as export needs them", "fp8tune import published.csv --compile"),
)
def import_(
    paths: Annotated[
        tuple[str, ...],
        Argument(
            "Another fp8tune database, also compressed (.db.xz); a CSV of published measurements; or configs that "
            "others tuned: a Triton cache, JSON of Hugging Face kernels, vLLM or SGLang, or a folder of them.",
            metavar="PATH...",
        ),
    ] = (),
    kernel: Annotated[
        str,
        Option("--kernel", "What others' configs are of, as show names it: some files do not say.", placeholder="NAME"),
    ] = "",
    device: Annotated[
        str, Option("--device", "The GPU that they are for, such as 'NVIDIA H200'.", placeholder="NAME")
    ] = "",
    db: WrittenDatabase = None,
    compile: Annotated[bool, Option("--compile", "Also compile all published configs, as export needs them.")] = False,
    format: JsonOrTable = TableFormat.TABLE,
) -> None:
    """Merge another database, published rows, or others' configs.

    All rows of another database are kept. Published rows carry their source. A file is read whole or not at all.

    Configs that others tuned are published rows too, most without a time: show --published lists them beside what was
    measured here. Of a folder, damaged files are named and the others read.

    Export takes a published config of our kernels only if it compiles for its arch: --compile does that, or
    fp8tune sweep --arch ARCH.
    """
    from fp8tune.importing import archives, foreign
    from fp8tune.importing import files as importing
    from fp8tune.render import contracts
    from fp8tune.render.progress import Display, SweepProgress
    from fp8tune.store.results import Store
    from fp8tune.sweep import picks as deciding
    from fp8tune.sweep import published

    if not paths:
        raise UsageError("nothing to import: give a database, a CSV file, or the configs of others")
    files = [Path(path) for path in paths]
    picks = {path: foreign.read(path, notice, kernel) for path in files if foreign.is_foreign(path)}
    with contextlib.ExitStack() as stack:
        there = {path: stack.enter_context(archives.unpacked(path)) for path in files if path not in picks}
        loaded = {path: importing.load(found, published.lookup_key) for path, found in there.items()}
        store = stack.enter_context(Store.open(database_to_write(db), create=True))
        for path in files:
            if path in picks:
                rows = foreign.RowMaker(store, device, notice).rows(picks[path])
                if not rows:
                    raise UsageError(f"{visible(str(path))}: none of its configs can be stored")
                loaded[path] = importing.Loaded(path, rows=tuple(rows))
            with Display() as display:
                report = loaded[path].store(store, lambda done, total: display.update("rows stored", done, total))
            if format is TableFormat.JSON:
                print_json_line(contracts.imported(str(path), report.added, report.already_there))
            else:
                print(f"{visible(str(path))}: {report.added} rows added, {report.already_there} already there")
        if compile:
            # also with nothing new: the kernels may have changed since they were compiled
            with SweepProgress() as shown:
                for event in published.compile_published(store):
                    shown.show(event)
        deciding.keep_current(store)
        named_configs = (row.config for path in files if path not in picks for row in loaded[path].rows)
        if not compile and any(config is not None for config in named_configs):
            named = " ".join(visible(str(path)) for path in files)
            notice(f"nothing was compiled: fp8tune import --compile {named} does so, export needs it")
