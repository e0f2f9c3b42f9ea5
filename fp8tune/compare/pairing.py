"""What two checkouts have to be compared on: their problems, the configs each side launches, and whether it differs.

Everything is asked of workers that have taken one side's kernels. What cannot be timed against anything is settled
here: rows of one side only, identical code, wrong bytes. Code that cannot be built ends the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ParamSpec, TypeVar

from fp8tune.compare import side
from fp8tune.compare.comparison import ComparedRow
from fp8tune.compare.duel import Arm, Contest
from fp8tune.compare.retuning import CONFIGS, retune
from fp8tune.compare.side import Side, Survey
from fp8tune.compare.verdicts import ChangeVerdict
from fp8tune.errors import UsageError
from fp8tune.measure.compiling import compile_edges
from fp8tune.measure.laboratory import Laboratory, answer_to
from fp8tune.measure.worker import RemoteError, Worker, WorkerDied, WorkerPool, usable_cores
from fp8tune.records import Device, Kind, NamedInts, Outcome, Problem, Status

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT_S = 300.0
BROKEN = (Status.WRONG, Status.CRASHED, Status.TIMEOUT)
"""How a config that was built can fail on its bytes; anything else means that it cannot be built or launched here."""


class Configs(StrEnum):
    """Which config each side launches."""

    OWN = "own"
    """What its own exported table says, else its default: what its users get."""
    SAME = "same"
    """What the first side's table says, on both: isolates the kernel's code."""
    RETUNE = "retune"
    """The fastest of each side's own grid, found anew with an equal budget."""


@dataclass(frozen=True)
class Kernel:
    """A kernel declared at both sides: how the workers of each load it."""

    name: str
    references: tuple[str, str]
    same_source: bool
    """Whether the text on the timed path is the same."""


@dataclass(frozen=True)
class Match:
    """The two sides as they meet: checkouts, and where and with which clock their kernels run."""

    sides: tuple[Side, Side]
    laboratory: Laboratory
    wanted: side.Plan
    configs: Configs

    @property
    def device(self) -> Device:
        """Where everything runs."""
        return self.laboratory.device


@dataclass(frozen=True)
class Step:
    """What is being done, before there is anything to time."""

    text: str
    done: int = 0
    total: int = 0
    """0 where it is one thing."""


# Problems and configs


def contests(match: Match, kernel: Kernel) -> tuple[list[Contest], list[ComparedRow]]:
    """The problems that both sides have, each with its configs; and the rows that one side alone has."""
    before, after = (
        _ask(of, side.survey, reference, match.wanted)
        for of, reference in zip(match.sides, kernel.references, strict=True)
    )
    common = [problem for problem in before.configs if problem in after.configs]
    lone = [(ChangeVerdict.REMOVED, p) for p in before.configs if p not in after.configs]
    lone += [(ChangeVerdict.NEW, p) for p in after.configs if p not in before.configs]
    alone = [ComparedRow(kernel.name, verdict, problem, match.device) for verdict, problem in lone]
    return [_contest(match, kernel, problem, before, after) for problem in common], alone


def _contest(match: Match, kernel: Kernel, problem: Problem, before: Survey, after: Survey) -> Contest:
    one, other = kernel.references
    if match.configs is Configs.SAME:
        config = before.configs[problem]
        if set(config) != set(after.default):
            raise UsageError(f"{kernel.name} has other axes after: compare with --configs own or retune")
        return Contest(problem, Arm(one, config), Arm(other, config))
    if match.configs is Configs.OWN:
        return Contest(problem, Arm(one, before.configs[problem]), Arm(other, after.configs[problem]))
    tuned: list[NamedInts] = []
    for of, reference, survey in zip(match.sides, kernel.references, (before, after), strict=True):
        others = _ask(of, side.candidates, reference, problem, match.device, CONFIGS)
        listed = [survey.default, survey.configs[problem], *others]
        tuned.append(retune(of, reference, problem, listed, match.laboratory))
    return Contest(problem, Arm(one, tuned[0]), Arm(other, tuned[1]))


# Identical code


def same_code(
    match: Match, kernels: Sequence[Kernel], entries: Sequence[Contest]
) -> Generator[Step, None, list[bool | str]]:
    """For each contest, whether both sides run the same; a text where the first side does not compile.

    A clock that runs no kernel goes by the kernels' text. Raises UsageError where the second side does not compile.
    """
    if match.laboratory.kind is Kind.SIMULATED:
        same_text = {kernel.name for kernel in kernels if kernel.same_source}
        return [e.problem.kernel in same_text and e.before.config == e.after.config for e in entries]
    codes = yield from _on_all_cores(match, entries, side.code, "compiling")
    return [_same(match, e, old, new) for e, old, new in zip(entries, codes[::2], codes[1::2], strict=True)]


def _on_all_cores(
    match: Match, entries: Sequence[Contest], function: Callable[[str, Problem, NamedInts, str], T], text: str
) -> Generator[Step, None, list[T | Exception]]:
    """Compile something of each contest at both sides: the answers, before and after in turns, or what was raised."""
    pools = [WorkerPool(max(1, usable_cores() // 2)) for _ in match.sides]
    try:
        futures = []
        for entry in entries:
            for of, pool, arm in zip(match.sides, pools, (entry.before, entry.after), strict=True):
                within: Callable[..., T] = side.within
                asked = (of, function, arm.reference, entry.problem, arm.config, match.device.arch)
                futures.append(pool.submit(TIMEOUT_S, within, *asked))
        answers: list[T | Exception] = []
        for number, future in enumerate(futures):
            error = future.exception()
            if error is not None and not isinstance(error, WorkerDied | RemoteError):
                raise error
            answers.append(future.result() if error is None else _first_line(error))
            yield Step(text, number + 1, len(futures))
        return answers
    finally:
        for pool in pools:
            pool.close()


def _first_line(error: BaseException) -> Exception:
    return RuntimeError(str(error).strip().splitlines()[-1][:300])


def _same(match: Match, entry: Contest, old: str | Exception, new: str | Exception) -> bool | str:
    if isinstance(new, Exception):
        raise _unbuildable(match.sides[1], entry, str(new))
    return f"does not compile before: {old}" if isinstance(old, Exception) else old == new


def _unbuildable(of: Side, entry: Contest, reason: str) -> UsageError:
    return UsageError(f"{of.name} cannot be built: {entry.problem.kernel} {entry.problem.shape}: {reason}")


# Bytes


def wrong_bytes(match: Match, entries: Sequence[Contest]) -> Generator[Step, None, list[ComparedRow | None]]:
    """For each contest the row it ends as, or None where both sides give the right bytes.

    Each side is held to its own reference, on the problem and on every edge that it declares. What edges launch is
    compiled first, on all cores. Raises UsageError where the second side cannot be launched, which is no matter of
    bytes.
    """
    if match.laboratory.compiles:
        yield from _on_all_cores(match, entries, compile_edges, "compiling edges")
    outcomes: list[list[Outcome]] = []
    for number, of in enumerate(match.sides):
        worker = Worker()
        try:
            outcomes.append([])
            for entry in entries:
                arm = (entry.before, entry.after)[number]
                outcomes[-1].append(_checked(worker, of, arm, entry.problem, match.laboratory.torch_device))
                yield Step("checking bytes", len(outcomes[-1]) + number * len(entries), 2 * len(entries))
        finally:
            worker.kill()
    return [_ended(match, *row) for row in zip(entries, *outcomes, strict=True)]


def _checked(worker: Worker, of: Side, arm: Arm, problem: Problem, torch_device: str) -> Outcome:
    try:
        return worker.call(TIMEOUT_S, side.within, of, side.check, arm.reference, problem, arm.config, torch_device)
    except (WorkerDied, RemoteError) as error:
        return answer_to(error)


def _ended(match: Match, entry: Contest, before: Outcome, after: Outcome) -> ComparedRow | None:
    if before.status is Status.OK and after.status is Status.OK:
        return None
    if after.status is Status.OUT_OF_MEMORY or before.status is Status.OUT_OF_MEMORY:
        return settled(match, entry, ChangeVerdict.INCONCLUSIVE, before.reason or after.reason)
    if after.status is Status.OK:
        return settled(match, entry, ChangeVerdict.NEW, f"not right before ({before.status}): {before.reason}")
    if after.status not in BROKEN:
        raise _unbuildable(match.sides[1], entry, after.reason)
    if before.status is Status.OK:
        return settled(match, entry, ChangeVerdict.NEWLY_WRONG, f"{after.status}: {after.reason}")
    return settled(match, entry, ChangeVerdict.INCONCLUSIVE, f"right at neither side: {after.reason}")


def settled(match: Match, entry: Contest, verdict: ChangeVerdict, reason: str = "") -> ComparedRow:
    """A row that ends without being timed."""
    return ComparedRow(
        entry.problem.kernel,
        verdict,
        entry.problem,
        match.device,
        reason=reason,
        before_config=entry.before.config,
        after_config=entry.after.config,
    )


def _ask(of: Side, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """One question to a worker of a side. What its kernels raise on import is one line with the side's name."""
    worker = Worker()
    try:
        return worker.call(TIMEOUT_S, side.within, of, function, *args, **kwargs)
    except UsageError as error:
        raise UsageError(f"{of.name}: {error}") from None
    except (WorkerDied, RemoteError) as error:
        raise UsageError(f"{of.name} cannot be built: {_first_line(error)}") from None
    finally:
        worker.kill()
