"""``compare A..B`` on this machine: both revisions checked out, built, checked and timed against each other now.

    checkouts -> survey -> compile both sides -> check their bytes -> stage 1, all rows -> stage 2, contested rows

Yields what it is doing as it goes, and the comparison last. Nothing is stored: the rows are of two checkouts in turn,
which a database row cannot say.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8tune import scratch
from fp8tune.compare import duel, pairing, side, verdicts
from fp8tune.compare.comparison import ComparedRow, Comparison, Revision
from fp8tune.compare.duel import Contest, Played, Score
from fp8tune.compare.pairing import Configs, Kernel, Match, Step
from fp8tune.compare.recorded import WORKTREE, declared_hashes, parse_range
from fp8tune.compare.side import Side
from fp8tune.compare.verdicts import ChangeVerdict
from fp8tune.errors import MachineError
from fp8tune.measure.laboratory import Laboratory
from fp8tune.measure.worker import start_server
from fp8tune.plan import shapes
from fp8tune.records import Kind
from fp8tune.revisions import checkouts, git, source
from fp8tune.stats import geomean
from fp8tune_kernels import catalog
from fp8tune_kernels.arches import ARCHES

FREE_CONTROLS = 3
"""Rows of identical code that are timed along: unlike the control arm they use both checkouts and both caches."""


@dataclass(frozen=True)
class Wish:
    """The options of ``fp8tune compare`` that matter to a live one."""

    revisions: str
    repository: Path = Path(".")
    kernels: tuple[str, ...] = ()
    """Empty: all that are declared at both sides."""
    shapes: tuple[str, ...] = ("llama4",)
    routing: str = "jagged"
    scale_mode: str | None = None
    seed: int = 0
    configs: Configs = Configs.OWN
    blind: bool = False
    """Time and judge identical code like any other: shows what verdicts this machine gives where nothing changed."""


Event = Step | Played | Comparison


def compare(wish: Wish, laboratory: Laboratory) -> Iterator[Event]:
    """Compare two revisions here. Closing the generator ends the workers and removes the checkouts.

    Raises UsageError for names and revisions nobody knows and for a side that cannot be built, MachineError without a
    GPU (or a simulated clock) and where git refuses.
    """
    if laboratory.kind not in (Kind.MEASURED, Kind.SIMULATED):
        raise MachineError("there is no GPU here to time on: use --from-db, or --timer simulated:1")
    root = git.toplevel(wish.repository)
    before, after = parse_range(root, wish.revisions)
    rows, declared = _declared(wish, root, before, after)
    start_server()
    yield Step(f"checking out {before} and {after}")
    commits = [None if revision.name == WORKTREE else revision.commit for revision in (before, after)]
    with checkouts.checkouts(root, commits) as folders, scratch.folder("cache") as cache:
        sides = tuple(
            Side(str(revision), folder, cache / str(number), source.SOURCE_ROOTS)
            for number, (revision, folder) in enumerate(zip((before, after), folders, strict=True))
        )
        match = Match((sides[0], sides[1]), laboratory, _plan(wish, laboratory), wish.configs)
        kernels = [
            Kernel(name, (_moved(kernel, root, folders[0]), _moved(kernel, root, folders[1])), same)
            for name, kernel, same in declared
        ]
        comparison = Comparison(before, after, tuple(rows), origin=f"Timed in turns, --configs {wish.configs}")
        yield from _Run(match, comparison, wish.blind).events(kernels)


def _declared(
    wish: Wish, root: Path, before: Revision, after: Revision
) -> tuple[list[ComparedRow], list[tuple[str, str, bool]]]:
    """Rows of kernels declared at one side only; and (name, reference, same source) of those at both."""
    rows, both = [], []
    for kernel in wish.kernels or catalog.KERNELS:
        name, hashes = declared_hashes(kernel, root, before, after, required=bool(wish.kernels))
        if None not in hashes:
            both.append((name, kernel, hashes[0] == hashes[1]))
        elif hashes != (None, None):
            rows.append(ComparedRow(name, ChangeVerdict.NEW if hashes[0] is None else ChangeVerdict.REMOVED))
    return rows, both


def _moved(kernel: str, root: Path, folder: Path) -> str:
    """How workers of a checkout load a kernel: a file by its path there, all else by name."""
    path, _, attribute = kernel.rpartition(":")
    if not path.endswith(".py"):
        return kernel
    return f"{folder / Path(path).resolve().relative_to(root.resolve())}:{attribute}"


def _plan(wish: Wish, laboratory: Laboratory) -> side.Plan:
    arch = laboratory.device.arch
    return side.Plan(
        rows=tuple(row for name in wish.shapes for row in shapes.load(name).rows),
        routing=wish.routing,
        fp8_dtype=ARCHES[arch].fp8_dtype if arch in ARCHES else "float8_e4m3fn",
        scale_mode=wish.scale_mode,
        seed=wish.seed,
        arch=arch,
        device=laboratory.device.name,
    )


class _Run:
    """One live comparison: settles rows until all have their verdict."""

    def __init__(self, match: Match, comparison: Comparison, blind: bool) -> None:
        self._match = match
        self._comparison = comparison
        self._blind = blind
        self._rows = list(comparison.rows)

    def events(self, kernels: Sequence[Kernel]) -> Iterator[Event]:
        contests: list[Contest] = []
        for kernel in kernels:
            yield Step(f"surveying {kernel.name}")
            found, alone = pairing.contests(self._match, kernel)
            contests += found
            self._rows += alone
        changed, same = yield from self._sorted(kernels, contests)
        changed = yield from self._right(changed)
        same = yield from self._right_on_edges(same, {kernel.name for kernel in kernels if not kernel.same_source})
        if changed:
            yield from self._timed(changed, same)
        else:
            self._settle(same, ChangeVerdict.SAME_CODE)
            yield self._finished([])

    def _settle(self, contests: Sequence[Contest], verdict: ChangeVerdict, reason: str = "") -> None:
        self._rows += [pairing.settled(self._match, contest, verdict, reason) for contest in contests]

    def _sorted(
        self, kernels: Sequence[Kernel], contests: Sequence[Contest]
    ) -> Generator[Event, None, tuple[list[Contest], list[Contest]]]:
        """Rows whose code differs, and those where it does not. What does not compile before is NEW."""
        answers = yield from pairing.same_code(self._match, kernels, contests)
        changed, same = [], []
        for contest, answer in zip(contests, answers, strict=True):
            if isinstance(answer, str):
                self._settle([contest], ChangeVerdict.NEW, answer)
            elif answer and not self._blind:
                same.append(contest)
            else:
                changed.append(contest)
        return changed, same

    def _right(self, contests: list[Contest]) -> Generator[Event, None, list[Contest]]:
        """Rows whose bytes are right on both sides; the others end here."""
        if self._match.laboratory.kind is Kind.SIMULATED or not contests:
            return contests
        ended = yield from pairing.wrong_bytes(self._match, contests)
        self._rows += [row for row in ended if row is not None]
        return [contest for contest, row in zip(contests, ended, strict=True) if row is None]

    def _right_on_edges(
        self, same: Sequence[Contest], edited: Collection[str]
    ) -> Generator[Event, None, list[Contest]]:
        """Rows that launch the same, less those whose edited kernel is wrong: an edge may have a binary of its own."""
        right = yield from self._right([contest for contest in same if contest.problem.kernel in edited])
        return [contest for contest in same if contest.problem.kernel not in edited or contest in right]

    def _timed(self, changed: Sequence[Contest], same: Sequence[Contest]) -> Iterator[Event]:
        free, spared = same[:FREE_CONTROLS], same[FREE_CONTROLS:]
        self._settle(spared, ChangeVerdict.SAME_CODE)
        first = range(verdicts.STAGE_ONE_ROUNDS)
        scores = yield from self._play([*changed, *free], first)
        open_rows = [i for i, score in enumerate(scores[: len(changed)]) if _is_open(score)]
        second = range(first.stop, first.stop + verdicts.STAGE_TWO_ROUNDS)
        fresh = dict(zip(open_rows, (yield from self._play([changed[i] for i in open_rows], second)), strict=True))

        arms = len(scores) + len(fresh)
        for i, contest in enumerate(changed):
            score, tested = (fresh[i], len(fresh)) if i in fresh else (scores[i], 1)
            self._rows.append(self._judged(contest, score, tested, arms))
        for contest, score in zip(free, scores[len(changed) :], strict=True):
            self._rows.append(self._free_control(contest, score, arms))
        cleared = [score for i, score in enumerate(scores[: len(changed)]) if i not in fresh]
        yield self._finished([cleared, [*fresh.values()]])

    def _play(self, contests: Sequence[Contest], rounds: range) -> Generator[Event, None, list[Score]]:
        scores = [Score() for _ in contests]
        if contests:
            yield from duel.play(contests, scores, self._match.sides, self._match.laboratory, rounds)
        return scores

    def _judged(self, contest: Contest, score: Score, tested: int, arms: int) -> ComparedRow:
        """``tested`` rows are decided together; ``arms`` control arms are looked at."""
        row = pairing.settled(self._match, contest, ChangeVerdict.INCONCLUSIVE, score.failure)
        if score.failure:
            return row
        effect, control = verdicts.paired(score.changes), verdicts.paired(score.controls)
        return replace(
            row,
            verdict=verdicts.judge(effect, tested),
            before_us=geomean(score.before_us),
            after_us=geomean(score.after_us),
            effect=effect,
            control=control,
            quiet=verdicts.quiet(control, arms),
            tested=tested,
            n=len(score.changes),
            blocks=score.blocks,
            stalled=score.stalled,
            throttled=score.throttled,
            slowdowns=tuple(sorted(score.slowdowns)),
        )

    def _free_control(self, contest: Contest, score: Score, arms: int) -> ComparedRow:
        """Identical code: not only the control arm but the change itself has to be quiet."""
        row = self._judged(contest, score, 1, arms)
        quiet = row.quiet and row.effect is not None and verdicts.quiet(row.effect, arms)
        return replace(row, verdict=ChangeVerdict.SAME_CODE, quiet=quiet)

    def _finished(self, stages: Sequence[Sequence[Score]]) -> Comparison:
        """The comparison with its rows in order, and what all rows together say."""
        played = [scores for stage in stages if (scores := [score for score in stage if not score.failure])]
        rows = tuple(sorted(self._rows, key=_order))
        if not played:
            return replace(self._comparison, rows=rows)
        changes, controls = (
            [[getattr(score, name) for score in stage] for stage in played] for name in ("changes", "controls")
        )
        overall, control = verdicts.all_rows(changes, controls), verdicts.geomean(controls)
        return replace(self._comparison, rows=rows, overall=overall, control=control)


def _is_open(score: Score) -> bool:
    return not score.failure and verdicts.contested(verdicts.paired(score.changes))


def _order(row: ComparedRow) -> tuple[str, list[tuple[str, int]], str]:
    return row.kernel, list(row.shape.items()), repr(row.problem)
