"""Rules for names and lines of text: one definition for what is loaded, stored and shown."""

from __future__ import annotations

import re

SPEC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}")
"""Name that a spec may give its kernel: names reach paths, tables and terminals."""

_PLACE = r"(?:[A-Za-z_][A-Za-z0-9_.]*|[A-Za-z0-9_./\-]+\.py)"

_ITEM = r"\[(?:-?[0-9]{1,18}|'[A-Za-z0-9_.\-]+')\]"

ATTRIBUTE = re.compile(rf"[A-Za-z_][A-Za-z0-9_.]*(?:{_ITEM})?")
"""The place of a kernel in its module: ``softmax``, ``Layer.kernel``, ``BY_WIDTH[2]``."""

KERNEL_NAME = re.compile(rf"_?{SPEC_NAME.pattern}|(?=.{{1,200}}\Z){_PLACE}:{ATTRIBUTE.pattern}")
"""Name of a kernel in rows: as its spec says, ``module:attribute`` or ``path.py:attribute`` where it was
recorded, or its function's name where others published configs of it."""

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
"""Name of an axis or a dimension."""

WORD = re.compile(r"[A-Za-z0-9_.:+\-]{0,64}")
"""A mode, a layout, a dtype, a version."""

_CONTROLS = r"\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff"
"""Characters that control a terminal, end a line or turn text around."""

_UNENCODABLE = r"\ud800-\udfff"

LINE = re.compile(rf"[^{_CONTROLS}{_UNENCODABLE}]{{0,500}}")
"""One line without such characters: safe on a terminal and in a JSON file."""

_UNSEEN = re.compile(rf"[{_CONTROLS}{_UNENCODABLE}]")


def visible(text: str) -> str:
    """Return a text on one line, with controls and lone surrogates (no encoding has them) as ``\\x1b[2J``."""
    if text.isprintable():  # fast, and refuses all that is written out here
        return text
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


_FORMULA = re.compile(r"'*[=+\-@]")


def quoted_formula(cell: str) -> str:
    """Return a text for a CSV file, with a quote before it if a spreadsheet would calculate it (``=1+1``)."""
    return f"'{cell}" if _FORMULA.match(cell) else cell


def unquoted_formula(cell: str) -> str:
    """Return the text from which :func:`quoted_formula` made a cell."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def short_dtype(name: str) -> str:
    """Return the short name of a dtype, such as ``bf16``."""
    return name.removeprefix("float8_").removesuffix("fn").replace("bfloat", "bf").replace("float", "fp")
