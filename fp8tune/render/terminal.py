"""What all output is made of: notices, JSON, CSV and the formats of numbers.

Results go to stdout, progress and notices to stderr.
"""

from __future__ import annotations

import csv
import json
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from fp8tune.records import RECORDED
from fp8tune.redaction import redacted
from fp8tune.text import quoted_formula
from fp8tune.text import visible as visible
from fp8tune_kernels.spec import DTYPE_FLAG, DTYPES


def notice(*lines: str) -> None:
    """Lines for the user that are not the result."""
    for line in lines:
        print(visible(redacted(line)), file=sys.stderr)


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2))


def print_json_line(value: object) -> None:
    """One JSON object on one line of stdout, written at once."""
    print(json.dumps(value), flush=True)


def print_csv(rows: Sequence[Mapping[str, object]]) -> None:
    """Rows of the same names with a header; a mapping in a cell as name=value pairs."""
    if not rows:
        return
    writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _csv_cell(value) for name, value in row.items()})


def _csv_cell(value: object) -> object:
    if isinstance(value, dict):
        return " ".join(f"{name}={item}" for name, item in value.items())
    return quoted_formula(value) if isinstance(value, str) else value


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None where it is a file or pipe, whose lines are not folded."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def folded(line: str, width: int | None, first: str = "") -> list[str]:
    """A line after ``first`` in as many lines as ``width`` columns need, the further ones indented as far."""
    indent = " " * len(first)
    if width is None or len(first) + len(line) <= width:
        return [first + line]
    return textwrap.wrap(line, max(width, 2 * len(indent)), initial_indent=first, subsequent_indent=indent)


def path_here(path: Path) -> str:
    """A path as one would type it: relative where it lies below this folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


LONGEST_NAME = 40
"""Characters of a kernel's name in a table; JSON has all."""


def kernel_name(name: str, longest: int = LONGEST_NAME) -> str:
    """A kernel's name, cut on the left where it is long: what tells ``module.sub:attr`` apart stands at its end."""
    return name if len(name) <= longest else f"...{name[3 - longest :]}"


def counted(number: int, what: str) -> str:
    """``1 unit``, ``2 units``, ``3 processes``."""
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def layout_name(layout: str) -> str:
    """An input layout; of a recorded launch the first half of its id, which tells launches apart: ``e9f809``."""
    return layout[len(RECORDED) :][:6] if layout.startswith(RECORDED) else layout


def lookup_key(key: Mapping[str, int]) -> str:
    """A lookup key with its dtype by name: ``K=4096 in_dtype=float16``."""
    return " ".join(
        f"{name}={DTYPES[value] if name == DTYPE_FLAG and value < len(DTYPES) else value}"
        for name, value in key.items()
    )


# Numbers. No number is an empty text


def microseconds(value: float | None, missing: str = "") -> str:
    """``12.34``, ``148.2``, ``9,014``: four significant digits at most, no unit (the column has it)."""
    if value is None:
        return missing
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


AT_MOST = "rates as if whole tensors were moved"
"""Of a recorded kernel, which may address a part of them."""


def checked(check: str) -> str:
    """How rows were checked, in words: ``checked within 1e-03 relative of float64``."""
    kind, _, rest = check.partition(" ")
    equal = "for equal bytes"
    words = {"exact": equal, "exact-inputs": f"{equal} on inputs whose sums are exact", "tolerance": "within"}
    return f"checked {words.get(kind, kind)} {rest.replace('to the first', 'against the first')}".rstrip()


def share(value: float | None, digits: int = 0) -> str:
    """``58 %`` for 0.58."""
    return "" if value is None else f"{100 * value:.{digits}f} %"


def slower(ratio: float | None, digits: int = 1) -> str:
    """``+4.3 %`` for a time 1.043 times another."""
    return "" if ratio is None else f"{100 * (ratio - 1):+.{digits}f} %"


def times(ratio: float | None) -> str:
    """``1.20x``."""
    return "" if ratio is None else f"{ratio:.2f}x"


def rate(gb_per_s: float | None) -> str:
    """``2,892``, in GB/s."""
    return "" if gb_per_s is None else f"{gb_per_s:,.0f}"
