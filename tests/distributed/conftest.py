"""The checks on two and on four ranks, run once for all tests: ranks take seconds to start."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

Results = dict[str, list[dict[str, str]]]


@pytest.fixture(scope="session")
def results(once_a_run: Callable[[str, Callable[[], str]], str]) -> Results:
    """Number of ranks -> results of each of them, by check: see :func:`ranks.together`."""
    from ranks import checks, on_ranks

    names = {2: tuple(checks()), 4: ("experts_over_ranks",)}
    return json.loads(once_a_run("found by ranks", lambda: json.dumps(on_ranks(names))))  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def ranks(results: Results) -> list[dict[str, str]]:
    """Results of each of two ranks."""
    return results["2"]
