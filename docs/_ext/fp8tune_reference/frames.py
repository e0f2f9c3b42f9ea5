"""The columns of the DataFrames of the Python API."""

from __future__ import annotations

from fp8tune.api import frames
from fp8tune.output.documents import Document
from fp8tune_reference.markdown import code, needed, prose, sections, table


def part() -> str:
    """Return a table for each method. Raises UndocumentedError for a column without a text."""
    return sections(*(section(f"Results.{name}()", model) for name, model in frames.TABLES.items()))


def section(method: str, model: type[Document]) -> str:
    """Return the columns of one method."""
    rows = []
    for name, field in model.model_fields.items():
        column = frames.RENAMED.get(name, name)
        text = needed(field.description or "", f"column {column} of {method}")
        rows.append((code(column), code(frames.dtype(str(field.annotation))), prose(text)))
    return sections(f"### Columns of {code(method)}", table(["column", "dtype", "meaning"], rows))
