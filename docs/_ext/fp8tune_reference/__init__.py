"""The reference pages, written from the code when they are built.

A line ``<!-- reference: NAME -->`` of a page is replaced by the Markdown that ``PARTS[NAME]`` gives. Nothing that is
generated is committed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from fp8tune_reference import architecture, commands, concepts, database, frames, spec, words

MARK = re.compile(r"^<!-- reference: ([\w-]+) -->$", re.MULTILINE)

PARTS: dict[str, Callable[[], str]] = {
    "architecture": architecture.part,
    "ceiling": concepts.ceiling,
    "change-verdicts": words.change_verdicts,
    "check-numbers": concepts.check_numbers,
    "command-list": commands.overview,
    "commands": commands.part,
    "database": database.part,
    "exit-codes": words.exit_codes,
    "frames": frames.part,
    "lookup-steps": concepts.lookup_steps,
    "protocol": concepts.protocol,
    "routings": concepts.routings,
    "spec": spec.part,
    "verdicts": words.pick_verdicts,
    "why-not": words.why_not,
    "words": words.part,
}
"""Name -> the Markdown of a part of the reference."""


def filled(text: str) -> str:
    """A page with each mark replaced. Raises KeyError for a name that :data:`PARTS` has not."""
    return MARK.sub(lambda found: PARTS[found.group(1)](), text)


def _fill(app: Any, docname: str, source: list[str]) -> None:
    source[0] = filled(source[0])


def _outdated(app: Any, env: Any, *documents: set[str]) -> list[str]:
    """The pages with a mark: what they show may have changed though their text has not."""
    return [name for name in env.found_docs if MARK.search(env.doc2path(name).read_text(encoding="utf-8"))]


def setup(app: Any) -> dict[str, Any]:
    """What Sphinx calls."""
    app.connect("source-read", _fill)
    app.connect("env-get-outdated", _outdated)
    return {"parallel_read_safe": True}
