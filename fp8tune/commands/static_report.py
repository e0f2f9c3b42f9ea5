"""``fp8tune static-report``."""

from __future__ import annotations

from typing import Annotated

from fp8tune.commands.options import opened_to_read
from fp8tune.options import Arch, Group, Kernels, Option, ReadDatabase, TableFormat, examples
from fp8tune.records import Kind
from fp8tune.render.terminal import notice


@examples(
    ("What compiles for each arch", "fp8tune static-report"),
    ("Which configs suit one", "fp8tune static-report --arch gfx942 --kernel colwise"),
)
def static_report(
    kernels: Kernels = (),
    arch: Arch = None,
    db: ReadDatabase = None,
    format: Annotated[TableFormat, Option("--format", "table or json.", group=Group.OUTPUT)] = TableFormat.TABLE,
) -> None:
    """What was compiled for each arch and not run, and the config that suits it best; with --arch each that fits.

    Configs are in the order of choice: by what they lose where they were timed, and what they spill here. Filled by
    fp8tune sweep --static --arch ARCH. Needs no GPU.
    """
    from fp8tune.choose import ranking, untimed
    from fp8tune.render.evidence import print_compiled, print_fitting
    from fp8tune.store import names

    with opened_to_read(db) as (store, label):
        wanted = names.stored_kernels(kernels, store)
        if arch is not None:
            names.check_arch(arch, store)
        static = store.evidence(arch=arch, kinds=[Kind.STATIC])
        measured = store.evidence(arch=untimed.TIMED_ON, kinds=[Kind.MEASURED], keep=ranking.competing)
    found = untimed.compiled(static, untimed.timed(measured))
    rows = [row for name in wanted for row in found if row.kernel == name]
    if arch is not None:
        print_fitting(rows, format)
        return
    if not rows:
        notice(f"nothing was compiled only in {label}: run fp8tune sweep --static --arch {untimed.TIMED_ON}")
    print_compiled(rows, format)
