"""What ranks find, for all tests that look at it: ranks take seconds to start."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def ranks(once_a_run: Callable[[str, Callable[[], str]], str]) -> list[dict[str, Any]]:
    """What each of two ranks found, by check."""
    from distributed_checks import CHECKS, together  # FSDP takes seconds to import, and every worker reads this file
    from ranks import on_ranks

    checks = functools.partial(together, tuple(CHECKS))
    return json.loads(once_a_run("found by two ranks", lambda: json.dumps(on_ranks(checks))))  # type: ignore[no-any-return]
