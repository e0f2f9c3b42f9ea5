"""All views of a database, in the order of the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fp8tune.report import devices, limits, lookups, overview, problems
from fp8tune.report.contents import Contents
from fp8tune.report.view import View


def views(found: Contents) -> Iterator[View]:
    """The views that have something to show; the overview always."""
    yield overview.view(found)
    for module in (limits, lookups, devices):
        view = module.view(found)
        if view is not None:
            yield view


def problem_views(found: Contents) -> Iterator[tuple[View, Mapping[str, Any]]]:
    """A view a problem, with what filters read of it."""
    for row in found.rows:
        yield problems.view(row), {"kernel": row.kernel, "device": row.device}
