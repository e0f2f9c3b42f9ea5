"""``fp8tune show``."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fp8tune.commands.filters import Filters, Sort, ordered
from fp8tune.commands.options import opened_to_read
from fp8tune.commands.sizes import sizes
from fp8tune.errors import UsageError
from fp8tune.options import Arch, Group, Kernels, Names, OperationName, Option, ReadDatabase, examples
from fp8tune.render.terminal import notice
from fp8tune.stats.study import Verdict

if TYPE_CHECKING:
    from fp8tune.stats.study import Study

INTERPRETER = "interpreter"
"""The arch of what was checked without a GPU: nothing is timed there, so that nothing is best."""


class Format(enum.StrEnum):
    """What ``show`` prints."""

    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"
    CSV = "csv"


def _rows(value: int | None) -> int | None:
    """How many rows to print. Raises ValueError for none."""
    if value is not None and value < 1:
        raise ValueError(f"{value} rows are nothing to show: give 1 or more")
    return value


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """The options of ``show``."""

    kernels: Kernels = ()
    arch: Arch = None
    shape: Annotated[
        tuple[str, ...],
        Option(
            "--shape",
            "Only problems with these sizes, such as M=16640,K=1408 or K=1408 alone. Repeatable: one has to fit.",
            "all",
            placeholder="SIZES",
        ),
    ] = ()
    device: Annotated[
        str, Option("--device", "Only GPUs whose name has this text.", "all", group=Group.WHERE, placeholder="TEXT")
    ] = ""
    verdict: Annotated[
        tuple[str, ...],
        Option(
            "--verdict",
            f"Only picks with this verdict: {', '.join(Verdict)}. Repeatable.",
            "all",
            placeholder="WORD",
            completes=Names.VERDICT,
        ),
    ] = ()
    op: Annotated[
        OperationName | None,
        Option(
            "--op",
            "grouped-mm or mxfp8-grouped-mm: what others published of the whole operation, instead.",
            placeholder="NAME",
        ),
    ] = None
    failed: Annotated[bool, Option("--failed", "How many configs of each problem failed and why, instead.")] = False
    recording: Annotated[
        str | None,
        Option("--recording", "What fp8tune record wrote: the kernels that ran, instead.", placeholder="FILE"),
    ] = None
    db: ReadDatabase = None
    sort: Annotated[
        Sort | None,
        Option(
            "--sort",
            "The order of rows. time, gain (over the next best) and noise: the largest first; share: the least first.",
            "shape",
            group=Group.OUTPUT,
        ),
    ] = None
    top: Annotated[
        int | None, Option("--top", "Only the first rows in that order.", "all", group=Group.OUTPUT, check=_rows)
    ] = None
    explain: Annotated[
        bool, Option("--explain", "Say below the table what its columns and words mean.", group=Group.OUTPUT)
    ] = False
    format: Annotated[Format, Option("--format", "table, markdown, json or csv.", group=Group.OUTPUT)] = Format.TABLE

    @property
    def rows_only(self) -> bool:
        """Whether an option is given that only the rows of picks know."""
        return bool(self.shape or self.device or self.verdict or self.sort or self.top)


@examples(
    ("What there is, a line a kernel", "fp8tune show"),
    ("The best config of each shape of a kernel", "fp8tune show --kernel colwise --arch sm_90"),
    ("Where most is left to gain, with a legend", "fp8tune show --sort share --top 10 --explain"),
    ("For a script", "fp8tune show --kernel colwise --format json"),
    ("What others published and nobody measured", "fp8tune show --verdict published"),
)
def show(options: ShowOptions) -> None:
    """The best config of each problem, with its share of the ceiling. Needs no GPU.

    Without --kernel or another filter a line a kernel, where there are several; json and csv have a row a problem.
    fp8tune explain says of one row how it came about.

    The ceiling is what memory gives: a copy in the same sweep, or the device's fastest kernel where that is faster.

    With --kernel also the one config that loses least over all its problems, and what it loses on each. With --op what
    others published of a whole operation, the rows that cannot be right marked. With --arch interpreter what was
    checked without a GPU. With --recording which kernels a program ran, and which to sweep first.
    """
    is_else = options.failed or options.arch == INTERPRETER
    if (is_else or options.op) and (options.rows_only or options.explain):
        raise UsageError(
            "--shape, --device, --verdict, --sort, --top and --explain are for picks: leave them out, or "
            "--op, --failed and --arch interpreter"
        )
    if options.recording is not None:
        _show_recording(options, options.recording)
    elif options.op is not None:
        if options.kernels or options.failed:
            raise UsageError("--op shows published rows of a whole operation: leave out --kernel and --failed")
        _show_operation(options, options.op)
    elif options.failed or options.arch == INTERPRETER:
        _show_tallies(options)
    else:
        _show_picks(options)


def _show_recording(options: ShowOptions, path: str) -> None:
    from fp8tune.render.recording import print_recording
    from fp8tune.replay.recording import read

    if options != ShowOptions(recording=path, format=options.format):
        raise UsageError("--recording shows a file: leave out what shows a database, all but --format")
    if options.format is Format.CSV:
        raise UsageError("--recording prints a table or JSON: use --format json")
    print_recording(read(Path(path)), path, options.format)


def _show_picks(options: ShowOptions) -> None:
    is_table = options.format in (Format.TABLE, Format.MARKDOWN)
    if is_table and not options.kernels and not options.rows_only and _show_overview(options):
        return
    from fp8tune.render.evidence import print_single_bests  # these load numpy, which the overview does not need
    from fp8tune.render.winners import print_winners

    studies, db = _studies(options)
    chosen = ordered(_filtered(options, studies))
    if not chosen and is_table:
        notice(f"no timed rows for this in {db}: run fp8tune sweep, or fp8tune import")
    shown = ordered(chosen, options.sort or Sort.SHAPE)[: options.top]
    print_winners(shown, options.format, explain=options.explain)
    if options.kernels and options.format is Format.TABLE and not options.rows_only:
        print_single_bests(studies)


def _show_overview(options: ShowOptions) -> bool:
    """Print a line a kernel if there are several, from kept picks where they are current; False otherwise."""
    from fp8tune import names
    from fp8tune.render.overview import print_overview
    from fp8tune.studies import summarize
    from fp8tune.sweep import picks

    with opened_to_read(options.db) as (store, db):
        if options.arch is not None:
            names.check_arch(options.arch, store)
        kernels = summarize(picks.read(store, arches=None if options.arch is None else [options.arch]))
    if len(kernels) > 1:
        print_overview(kernels, db, options.format, explain=options.explain)
    return len(kernels) > 1


def _filtered(options: ShowOptions, studies: Sequence[Study]) -> list[Study]:
    """Return the studies that the filters let through.

    Raises:
        UsageError: Nothing can pass a filter.
    """
    filters = Filters(tuple(map(sizes, options.shape)), options.device, options.verdict)
    filters.check([study.problem for study in studies], [study.device for study in studies])
    return [study for study in studies if filters.fits(study)]


def _studies(options: ShowOptions) -> tuple[list[Study], str]:
    """Return the studies of the kernels and arch that the options name, and the name of the database."""
    from fp8tune import names
    from fp8tune.stats.rank import TIMED_KINDS
    from fp8tune.studies import read_studies

    with opened_to_read(options.db) as (store, db):
        stored = names.stored_kernels(options.kernels, store)
        if options.arch is not None:
            names.check_arch(options.arch, store)
        kernels = stored if options.kernels else [None]
        return [study for name in kernels for study in read_studies(store, name, options.arch, TIMED_KINDS)], db


def _show_operation(options: ShowOptions, op: OperationName) -> None:
    from fp8tune.render.evidence import print_published

    with opened_to_read(options.db) as (store, db):
        published = [row for row in store.published() if op.covers(row) and options.arch in (None, row.device.arch)]
    if not published and options.format is Format.TABLE:
        notice(f"no published rows of {op} in {db}: run fp8tune import sweeps/published/grouped_mm.csv")
    print_published(published, options.format)


def _show_tallies(options: ShowOptions) -> None:
    from fp8tune import names
    from fp8tune.render.tallies import print_tallies
    from fp8tune.store.read import subjects_of

    with opened_to_read(options.db) as (store, db):
        kernels = names.stored_kernels(options.kernels, store)
        if options.arch not in (None, INTERPRETER):
            names.check_arch(options.arch, store)
        tallies = [store.tally(subject) for name in kernels for subject in subjects_of(store.pools(name, options.arch))]
    shown = [tally for tally in tallies if tally.failures or not options.failed]
    if not shown and options.format is Format.TABLE:
        notice(f"nothing failed of what is in {db}" if tallies else f"nothing was tried of this in {db}")
    else:
        print_tallies(shown, options.format)
