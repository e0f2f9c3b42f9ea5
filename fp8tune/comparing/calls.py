"""Calls of functions in worker processes that have the kernels of one checkout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from fp8tune.errors import UsageError
from fp8tune.measure.backends import outcome_of
from fp8tune.measure.trees import Tree, within
from fp8tune.measure.worker import RemoteError, WorkerDied, WorkerPool, usable_cores

T = TypeVar("T")

TIMEOUT_S = 300.0  # of a call

Call = tuple[Tree, str, tuple[Any, ...]]
"""A checkout, a subject for errors, and arguments."""


def call(
    trees: tuple[Tree, Tree],
    calls: Sequence[Call],
    function: Callable[..., T],
    report: Callable[[int], object] = lambda done: None,
) -> list[T | UsageError]:
    """Call a function in each checkout with its arguments; return the results, or errors.

    ``report`` is called with the number of calls that are done.
    """
    inside: Callable[..., T] = within
    pools = {tree: WorkerPool(max(1, usable_cores() // 2)) for tree in trees}
    results: list[T | UsageError] = []
    try:
        futures = [pools[tree].submit(TIMEOUT_S, inside, tree, function, *args) for tree, _, args in calls]
        for (tree, subject, _), future in zip(calls, futures, strict=True):
            try:
                results.append(future.result())
            except (UsageError, WorkerDied, RemoteError) as error:
                reason = error if isinstance(error, UsageError) else outcome_of(error).reason
                results.append(UsageError(f"{tree.name} cannot be built: {subject}: {reason}"))
            report(len(results))
        return results
    finally:
        for pool in pools.values():
            pool.close()


def answers(results: Iterable[T | UsageError]) -> list[T]:
    """Return the results of :func:`call`. Raises the first UsageError."""
    values = []
    for result in results:
        if isinstance(result, UsageError):
            raise result
        values.append(result)
    return values
