"""Outputs of both sides on small inputs, launched by workers of both checkouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import SimpleQueue

from fp8tune.comparing import outputs
from fp8tune.comparing.rounds import Report
from fp8tune.errors import UsageError
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.backends import ProcessBackend, ProcessWorker, outcome_of
from fp8tune.measure.trees import Tree
from fp8tune.measure.worker import RemoteError, WorkerDied, usable_cores
from fp8tune.records import Kind, NamedInts, Outcome, Status
from fp8tune_kernels.spec import Edge

Outcomes = tuple[Outcome, Outcome]
"""What both sides gave. An ``ok`` of the second side with a reason says why the sides cannot be compared."""


@dataclass(frozen=True)
class Pair:
    """A launch of both sides on one input, and other configs of the second side to compare."""

    before: KernelArm
    after: KernelArm
    edge: Edge
    others: tuple[NamedInts, ...] = ()

    @classmethod
    def on(cls, edge: Edge, before: KernelArm, after: KernelArm, others: Sequence[NamedInts]) -> Pair:
        """Return the pair of an input, equal for all sizes that share it."""
        first, second = (KernelArm(arm.reference, edge.problem, arm.config) for arm in (before, after))
        return cls(first, second, edge, tuple(others))


def compare_pairs(
    backend: ProcessBackend, trees: tuple[Tree, Tree], pairs: Sequence[Pair], report: Report
) -> dict[Pair, Outcomes]:
    """Launch every pair: on the interpreter on all cores, on a GPU one after the other."""
    teams: SimpleQueue[tuple[ProcessWorker, ProcessWorker]] = SimpleQueue()
    count = usable_cores() if backend.kind is Kind.INTERPRETER else 1
    workers = [(backend.worker(trees[0]), backend.worker(trees[1])) for _ in range(count)]
    for team in workers:
        teams.put(team)

    def launched(pair: Pair) -> Outcomes:
        team = teams.get()
        try:
            return _outcomes(pair, *team, trees[0].name, backend.torch_device)
        finally:
            teams.put(team)

    threads, results = ThreadPoolExecutor(count), dict[Pair, Outcomes]()
    try:
        for pair, result in zip(pairs, threads.map(launched, pairs), strict=True):
            results[pair] = result
            report("comparing outputs", len(results), len(pairs))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in (worker for team in workers for worker in team):
            worker.close()
    return results


def _outcomes(pair: Pair, before: ProcessWorker, after: ProcessWorker, name: str, torch_device: str) -> Outcomes:
    """Launch a pair, and return the first failure, or what the configs of both sides gave."""
    expected, first = b"", _outcome(before, outputs.check, pair.before, pair.edge)
    if first.status is Status.OK:
        try:
            expected = before.run(outputs.expected, pair.before.reference, pair.edge, torch_device)
        except (WorkerDied, RemoteError) as error:
            first = outcome_of(error)

    def compared(config: NamedInts) -> Outcome:
        arm = replace(pair.after, config=config)
        if not expected:
            return _outcome(after, outputs.check, arm, pair.edge)
        return _outcome(after, outputs.compare, arm, pair.edge, expected, name)

    own = first, compared(pair.after.config)
    for config in pair.others if {outcome.status for outcome in own} == {Status.OK} else ():
        if (failed := compared(config)).status is not Status.OK:
            # the first side may fail so, too, if it has the config
            same = _outcome(before, outputs.check, replace(pair.before, config=config), pair.edge)
            if same.status is not failed.status:
                return first, replace(failed, reason=f"{failed.reason}, with {config}")
    return own


def _outcome(worker: ProcessWorker, function: Callable[..., Outcome], arm: KernelArm, *args: object) -> Outcome:
    try:
        return worker.outcome(function, arm, *args)
    except UsageError as error:  # of a reference that raises
        return Outcome(Status.COMPILE_ERROR, reason=str(error))


def urgency(outcomes: Outcomes) -> int:
    """Return the place of an input's outcomes in the order in which they decide about a size, from 0."""
    was_right, is_right = (outcome.status is Status.OK for outcome in outcomes)
    if was_right and is_right:
        return 2 if outcomes[1].reason else 4
    return 0 if was_right else 3 if is_right else 1
