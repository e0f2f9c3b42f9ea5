"""Safe Python literals for values from a database or a recording, for use in generated source."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

from fp8tune.errors import UsageError
from fp8tune.text import visible

_DTYPE = re.compile(r"(tl|torch)\.(u?int\d{1,2}|b?float\d{1,2}\w{0,12}|bool)", re.ASCII)


def literal(value: object, modules: Mapping[str, str] = {}) -> str:
    """Return a recorded value as Python source. ``modules`` maps ``tl`` and ``torch`` to their names in that source."""
    if value is None or isinstance(value, int):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if isinstance(value, str):
        return json.dumps(value) if value.isascii() and value.isprintable() else ascii(value)
    if isinstance(value, Sequence):
        items = [literal(item, modules) for item in value]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, content),) = value.items()
        if kind == "tuple" and isinstance(content, list | tuple):
            return literal(tuple(content), modules)
        if kind == "float" and content in ("nan", "inf", "-inf"):
            return f'float("{content}")'
        dtype = _DTYPE.fullmatch(str(content)) if kind == "dtype" else None
        if dtype and dtype[1] in modules:
            return f"{modules[dtype[1]]}.{dtype[2]}"
    raise UsageError(f"{visible(str(value))[:60]!r} cannot be written as source: use fp8tune.pin")
