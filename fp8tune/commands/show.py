"""``fp8tune show``."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from fp8tune.commands.options import (
    ArchOption,
    KernelOption,
    OperationName,
    ReadDatabaseOption,
    database_to_read,
)
from fp8tune.errors import UsageError

INTERPRETER = "interpreter"
"""The arch of what was checked without a GPU: nothing is timed there, so that nothing is best."""


class Format(enum.StrEnum):
    """What ``show`` prints."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def show(
    kernel: KernelOption = None,
    arch: ArchOption = None,
    op: Annotated[
        OperationName | None,
        typer.Option("--op", help="What others published of a whole operation, instead; grouped-mm: in any recipe."),
    ] = None,
    conflicts: Annotated[
        bool, typer.Option("--conflicts", help="Published rows that contradict each other, instead.")
    ] = False,
    failed: Annotated[
        bool, typer.Option("--failed", help="How many configs of each problem failed and why, instead.")
    ] = False,
    db: ReadDatabaseOption = None,
    format: Annotated[Format, typer.Option("--format", help="table, json or csv.")] = Format.TABLE,
) -> None:
    """The best config of each problem, with its share of the ceiling. Needs no GPU.

    The ceiling is what memory gives: a copy in the same sweep, or the device's fastest kernel where that is faster.

    With --kernel also the one config that loses least over all its problems, and what it loses on each. With --op what
    others published of a whole operation, the rows that cannot be right marked. With --arch interpreter what was
    checked without a GPU.
    """
    if op is not None:
        if kernel or conflicts or failed:
            raise UsageError(
                "--op shows published rows of a whole operation: leave out --kernel, --conflicts and --failed"
            )
        _show_operation(op, arch, database_to_read(db), str(format))
        return
    from fp8tune.choose import conflicts as contradicting
    from fp8tune.choose import incumbents, ranking
    from fp8tune.records import Kind
    from fp8tune.render import evidence as render_evidence
    from fp8tune.render import terminal as render
    from fp8tune.render.winners import print_winners
    from fp8tune.store import names
    from fp8tune.store.results import Store

    if failed or arch == INTERPRETER:
        if conflicts:
            raise UsageError("--conflicts shows published rows: leave out --failed and --arch interpreter")
        _show_tallies(kernel, arch, failed, database_to_read(db), str(format))
        return
    if conflicts and format is Format.CSV:
        raise UsageError("--conflicts prints a table or JSON: use --format json")
    db = database_to_read(db)
    picks = not (conflicts or (kernel and format is Format.TABLE))

    with Store.open(db, writable=False) as store:
        wanted = names.stored_kernels(kernel, store)
        if arch is not None:
            names.check_arch(arch, store)
        chosen = wanted if kernel else [None]
        if conflicts:
            evidence = [item for name in chosen for item in store.evidence(name, arch, [Kind.PUBLISHED])]
        else:
            keep = ranking.competing
            evidence = [item for name in chosen for item in store.evidence(name, arch, keep=keep, finalists_only=picks)]
    if conflicts:
        render_evidence.print_conflicts(contradicting.conflicts(evidence), str(format))
        return
    winners = ranking.winners(evidence, incumbents.COMMITTED)
    if not winners and format is Format.TABLE:
        render.notice(f"no timed rows for this in {db}: run fp8tune sweep, or fp8tune import")
    print_winners(winners, str(format))
    if kernel and format is Format.TABLE:
        render_evidence.print_single_bests(ranking.all_candidates(evidence, incumbents.COMMITTED))


def _show_operation(op: OperationName, arch: str | None, db: str, output_format: str) -> None:
    from fp8tune.render import published as render_published
    from fp8tune.render import terminal as render
    from fp8tune.store.results import Store

    with Store.open(db, writable=False) as store:
        rows = [row for row in store.published() if op.covers(row) and arch in (None, row.device.arch)]
    if not rows and output_format == "table":
        render.notice(f"no published rows of {op} in {db}: run fp8tune import sweeps/published/grouped_mm.csv")
    render_published.print_published(rows, output_format)


def _show_tallies(kernels: list[str] | None, arch: str | None, failed: bool, db: str, output_format: str) -> None:
    from fp8tune.render import tallies as render_tallies
    from fp8tune.render import terminal as render
    from fp8tune.store import names
    from fp8tune.store.results import Store

    with Store.open(db, writable=False) as store:
        wanted = names.stored_kernels(kernels, store)
        if arch is not None and arch != INTERPRETER:
            names.check_arch(arch, store)
        subjects = [subject for name in wanted for subject in store.tried_subjects(name, arch)]
        tallies = [store.tally(subject) for subject in subjects]
    shown = [tally for tally in tallies if tally.failures or not failed]
    if not shown and output_format == "table":
        render.notice(f"nothing failed of what is in {db}" if tallies else f"nothing was tried of this in {db}")
        return
    render_tallies.print_tallies(shown, output_format)
