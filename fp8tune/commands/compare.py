"""``fp8tune compare``."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from fp8tune.commands.options import (
    KernelOption,
    ReadDatabaseOption,
    RoutingOption,
    ScaleModeOption,
    SeedOption,
    TimerOption,
    database_to_read,
    shapes_option,
)


class CompareFormat(enum.StrEnum):
    """What ``compare`` prints."""

    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"
    HTML = "html"


class CompareConfigs(enum.StrEnum):
    """Which config ``compare`` launches on each side."""

    OWN = "own"
    SAME = "same"
    RETUNE = "retune"


def compare(
    revisions: Annotated[
        str, typer.Argument(help="A..B, or A...B from their merge base; WORKTREE is uncommitted work.", metavar="A..B")
    ],
    kernel: KernelOption = None,
    repo: Annotated[Path, typer.Option("--repo", help="The git repository that holds both revisions.")] = Path("."),
    shapes: Annotated[list[str] | None, shapes_option("llama4")] = None,
    routing: RoutingOption = "jagged",
    scale_mode: ScaleModeOption = None,
    seed: SeedOption = 0,
    configs: Annotated[
        CompareConfigs, typer.Option("--configs", help="Each side's own table; the first side's on both; tuned anew.")
    ] = CompareConfigs.OWN,
    blind: Annotated[
        bool, typer.Option("--blind", help="Time identical code too: A..A shows what this machine makes of no change.")
    ] = False,
    timer: TimerOption = None,
    from_db: Annotated[bool, typer.Option("--from-db", help="Run nothing: compare recorded rows.")] = False,
    db: ReadDatabaseOption = None,
    format: Annotated[
        CompareFormat, typer.Option("--format", help="table, markdown, json or html.")
    ] = CompareFormat.TABLE,
) -> None:
    """Whether a change made kernels slower, faster or wrong: both revisions built, checked and timed in turns.

    Without a GPU, or with --from-db, from recorded rows. Exit code 1: a regression or newly wrong bytes; 3: a row is
    open, or the control arm drifted; 0: neither.
    """
    from fp8tune.compare import live
    from fp8tune.compare import recorded as comparing
    from fp8tune.compare.comparison import Comparison
    from fp8tune.compare.rows import Configs
    from fp8tune.measure.backends.choice import backend_for
    from fp8tune.render import compare as render_compare
    from fp8tune.render import terminal as render
    from fp8tune.store.results import Store

    backend, notices = backend_for(None, timer)
    if from_db or not backend.times:
        with Store.open(database_to_read(db), writable=False) as store:
            comparison = comparing.compare_stored(store, repo, revisions, kernels=kernel)
        if not from_db:
            render.notice("no GPU here: from recorded rows, as with --from-db")
    else:
        options = live.Options(
            revisions=revisions,
            repository=repo,
            kernels=tuple(dict.fromkeys(kernel or ())),
            shapes=tuple(shapes or ("llama4",)),
            routing=routing,
            scale_mode=scale_mode,
            seed=seed,
            configs=Configs(configs),
            blind=blind,
        )
        for line in notices:
            render.notice(line)
        with render_compare.CompareProgress() as progress:
            for event in live.compare(options, backend):
                progress.show(event)
        assert isinstance(event, Comparison)  # the last one is
        comparison = event
    for line in comparison.notices:
        render.notice(line)
    render_compare.print_comparison(comparison, str(format))
    raise typer.Exit(comparison.exit_code)
