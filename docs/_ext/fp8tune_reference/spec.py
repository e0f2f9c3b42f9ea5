"""The fields of a kernel's spec, and of what it is made of."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

from fp8tune_kernels import spec
from fp8tune_reference import docstrings
from fp8tune_reference.markdown import code, needed, prose, sections, table

RECORDS = (spec.KernelSpec, spec.Problem, spec.Edge, spec.Span, spec.Tolerance, spec.DeviceLimits)

CONSTANTS = ("CHECKS", "DTYPES", "ROUTINGS", "SCALE_MODES", "CONTENTS")


def part() -> str:
    """A table for each record, then the names that their fields take."""
    texts = docstrings.of_attributes(spec)
    names = [(code(name), ", ".join(map(code, getattr(spec, name))), prose(texts[name])) for name in CONSTANTS]
    return sections(*map(section, RECORDS), "## Names", table(["constant", "values", "meaning"], names))


def section(record: type[Any]) -> str:
    """The fields of one record. Raises UndocumentedError for one without a docstring."""
    texts = docstrings.of_attributes(record)
    rows = []
    for one in dataclasses.fields(record):
        meaning = prose(needed(texts.get(one.name, ""), f"{record.__name__}.{one.name}"))
        rows.append((code(one.name), code(one.type), _default(one), meaning))
    paragraphs = map(prose, inspect.cleandoc(record.__doc__ or "").split("\n\n"))
    return sections(f"## `{record.__name__}`", *paragraphs, table(["field", "type", "default", "meaning"], rows))


def _default(one: dataclasses.Field[Any]) -> str:
    if one.default is not dataclasses.MISSING:
        derived = one.default is None and one.name in ("scaled_down", "bytes_moved")
        return "derived" if derived else "nothing" if inspect.isfunction(one.default) else code(repr(one.default))
    if one.default_factory is not dataclasses.MISSING:
        return code(re.sub(r"\(\)$", "", repr(one.default_factory())) or "{}")
    return "required"
