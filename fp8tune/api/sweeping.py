"""``fp8tune.sweep``: a sweep in this process, with an event for each thing that happens."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8tune.api import frames
from fp8tune.api.results import Names, Results, open, several
from fp8tune.redaction import redacted
from fp8tune.store import location
from fp8tune.store.results import Store
from fp8tune.sweeping import picks, planning, session
from fp8tune.sweeping.events import Event, Finished
from fp8tune.sweeping.options import Options
from fp8tune.sweeping.planning import Plan

if TYPE_CHECKING:
    from pandas import DataFrame

logger = logging.getLogger("fp8tune")


@dataclass(frozen=True)
class Swept:
    """What a sweep found."""

    db: str
    """Where its rows are."""
    picks: DataFrame
    """The best config of each of its problems: :data:`fp8tune.api.frames.PICKS`. Empty where nothing was timed."""
    problems: DataFrame
    """What became of the configs of each problem: :data:`fp8tune.api.frames.TALLIES`."""
    trials: int
    """In all, those that had a row before among them."""
    seconds: float
    left_out: int
    """Trials that the time budget left out."""
    notices: tuple[str, ...]
    """What to know of it, a line each."""
    is_right: bool
    """Whether every problem has a right config: what the command's exit code says."""

    @property
    def results(self) -> Results:
        """All rows of its database."""
        return open(self.db)


def sweep(
    kernel: Names = None,
    shapes: Names = "llama4",
    *,
    db: str | os.PathLike[str] | None = None,
    callback: Callable[[Event], object] | None = None,
    routing: str = "jagged",
    recording: str | os.PathLike[str] | None = None,
    check: str | None = None,
    reference: str | None = None,
    grid: Mapping[str, int | Sequence[int]] | None = None,
    arch: str | None = None,
    static: bool = False,
    scale_mode: str | None = None,
    in_dtype: str | None = None,
    seed: int = 0,
    timer: str | None = None,
    again: bool = False,
    retry_failed: bool = False,
    quick: bool = False,
    time_budget_s: float | None = None,
    trial_timeout_s: float = 120.0,
) -> Swept:
    """Check and time every config of a kernel's grid on every shape, and store each result as it comes.

    The options are those of ``fp8tune sweep``. ``kernel`` None is all of them, or all of a recording. ``shapes`` are
    shape sets or paths of TOML files. ``grid`` narrows or widens axes: ``{"num_warps": [4, 8]}``. ``db`` is a path or
    a URL; None is your own database.

    ``callback`` gets each event of :mod:`fp8tune.sweeping.events` as it happens. What it raises ends the sweep, as
    Ctrl-C does. Every stored row is kept, and the same call goes on from there.

    The sweep runs in this process and in workers that it starts. A script that calls it needs
    ``if __name__ == "__main__":``. Without a GPU it sets ``TRITON_INTERPRET=1`` here, and times nothing.

    Raises UsageError for what cannot be asked for, MachineError for what this machine cannot do, DatabaseError for a
    database that cannot be written. Configs that are wrong raise nothing: see :attr:`Swept.is_right`.
    """
    given: dict[str, Any] = {
        **({} if kernel is None else {"kernels": several(kernel)}),
        "shapes": several(shapes),
        "routing": routing,
        "recording": None if recording is None else os.fspath(recording),
        "check": check,
        "reference": reference,
        "grid": tuple(f"{axis}={_values(values)}" for axis, values in (grid or {}).items()),
        "arch": arch,
        "static": static,
        "scale_mode": scale_mode,
        "in_dtype": in_dtype,
        "seed": seed,
        "timer": timer,
        "again": again,
        "retry_failed": retry_failed,
        "quick": quick,
        "time_budget_s": time_budget_s,
        "trial_timeout_s": trial_timeout_s,
        "db": None if db is None else os.fspath(db),
    }
    options = _checked(given)
    notices: list[str] = []
    plan = planning.planned(options)
    path = location.to_write(options.db, notices.append)
    plan = planning.expanded(plan)
    return _run(plan, path, callback, [*notices, *plan.notices])


def _run(plan: Plan, db: str, callback: Callable[[Event], object] | None, notices: list[str]) -> Swept:
    for line in notices:
        logger.info(line)
    ended = Finished(0, 0.0)
    with Store.open(db, create=True) as store:
        with contextlib.closing(session.run(store, plan)) as events:  # type: ignore[type-var]  # a generator
            for event in events:
                if isinstance(event, Finished):
                    ended = event
                if callback is not None:
                    callback(event)
        tallies = session.tallies(store, plan)
        found = session.studies(store, plan)
    return Swept(
        db=db,
        picks=frames.table(frames.PICKS, picks.of(found)),
        problems=frames.table(frames.TALLIES, tallies),
        trials=ended.trials,
        seconds=ended.seconds,
        left_out=ended.left_out,
        notices=tuple(notices),
        is_right=all(tally.has_right for tally in tallies),
    )


def _values(values: int | Sequence[int]) -> str:
    return ",".join(map(str, [values] if isinstance(values, int) else values))


def _checked(given: Mapping[str, Any]) -> Options:
    """Return the options of planning. Raises UsageError."""
    text = ", ".join(f"{name}={value!r}" for name, value in given.items() if value != getattr(Options, name, None))
    return Options(**given, command=f"fp8tune.sweep({redacted(text.replace('kernels=', 'kernel=', 1))})")
