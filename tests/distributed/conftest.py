"""The checks on two ranks, run once for all tests: ranks take seconds to start."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def ranks(once_a_run: Callable[[str, Callable[[], str]], str]) -> list[dict[str, str]]:
    """Results of each of two ranks, by check: see :func:`ranks.together`."""
    from ranks import checks, on_ranks

    return json.loads(once_a_run("found by two ranks", lambda: json.dumps(on_ranks(checks()))))  # type: ignore[no-any-return]
