"""The columns of the DataFrames that the Python API gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8tune.api import frames
from fp8tune_reference import docstrings
from fp8tune_reference.markdown import code, needed, prose, sections, sentence, table

METHODS = {
    "Results.trials()": "TRIALS",
    "Results.picks(), Swept.picks": "PICKS",
    "Results.finals()": "FINALS",
    "Results.samples()": "SAMPLES",
    "Results.devices()": "DEVICES",
    "Swept.problems": "TALLIES",
}
"""What gives a table -> the name of its columns in :mod:`fp8tune.api.frames`."""


def part() -> str:
    """A table for each. Raises UndocumentedError for a column without a text."""
    texts = docstrings.of_attributes(frames)
    return sections(*(section(given, getattr(frames, name), texts[name]) for given, name in METHODS.items()))


def section(given: str, columns: Sequence[frames.Column[Any]], text: str) -> str:
    """The columns of one table."""
    heading = ", ".join(map(code, given.split(", ")))
    rows = [
        (code(one.name), code(one.dtype), prose(needed(one.says, f"column {one.name} of {given}"))) for one in columns
    ]
    return sections(f"### Columns of {heading}", sentence(text), table(["column", "dtype", "meaning"], rows))


def meanings() -> Mapping[str, Mapping[str, str]]:
    """``trials`` and so on -> column -> its text."""
    return {name.lower(): {one.name: one.says for one in getattr(frames, name)} for name in METHODS.values()}
