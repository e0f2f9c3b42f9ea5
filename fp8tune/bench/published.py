"""Grouped GEMM times that others published, to be shown beside measured ones: read from a CSV, checked, none dropped.

A row whose forward pass takes longer than forward and backward together cannot be right as printed. It is kept, and
says so.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8tune.errors import UsageError
from fp8tune.records import NamedInts
from fp8tune.store.columns import parse_named_ints

COLUMNS = (
    "source",
    "device",
    "arch",
    "recipe",
    "shape",
    "bf16_fwd_bwd_us",
    "scaled_fwd_bwd_us",
    "bf16_fwd_us",
    "scaled_fwd_us",
    "note",
)


@dataclass(frozen=True)
class Published:
    """One line. Times in microseconds; ``scaled`` is the recipe's FP8."""

    source: str
    device: str
    arch: str
    recipe: str
    shape: NamedInts
    bf16_fwd_bwd_us: float
    scaled_fwd_bwd_us: float
    bf16_fwd_us: float
    scaled_fwd_us: float
    note: str

    @property
    def speedup(self) -> float:
        """Of forward and backward, over bf16."""
        return self.bf16_fwd_bwd_us / self.scaled_fwd_bwd_us

    @property
    def impossible(self) -> str:
        """Why the line cannot be right; empty where nothing speaks against it."""
        slower = ["bf16"] if self.bf16_fwd_us >= self.bf16_fwd_bwd_us else []
        slower += ["scaled"] if self.scaled_fwd_us >= self.scaled_fwd_bwd_us else []
        return f"{' and '.join(slower)} forward is not below forward+backward" if slower else ""


def read(path: Path) -> list[Published]:
    """The lines of a CSV with :data:`COLUMNS`. Raises UsageError naming file and line."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.DictReader(file, strict=True)
            if tuple(lines.fieldnames or ()) != COLUMNS:
                raise UsageError(f"{path} line 1: the header must be {','.join(COLUMNS)}")
            return [_published(path, lines.line_num, fields) for fields in lines]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not CSV in UTF-8: {error}") from None


def _published(path: Path, line: int, fields: Mapping[str, str]) -> Published:
    try:
        texts = {name: fields[name] for name in ("source", "device", "arch", "recipe", "note")}
        times = {name: float(fields[name]) for name in COLUMNS if name.endswith("_us")}
        if wrong := [name for name, value in times.items() if not 0 < value < 1e9]:
            raise ValueError(f"{wrong[0]} is {fields[wrong[0]]}, wanted microseconds")
        return Published(shape=parse_named_ints(fields["shape"]), **texts, **times)  # type: ignore[arg-type]
    except (ValueError, TypeError, UsageError) as error:
        raise UsageError(f"{path} line {line}: {error}") from None


def as_json(row: Published) -> Mapping[str, object]:
    """One object of ``fp8tune bench --op grouped-mm --format json``."""
    return {
        "row": "published",
        "source": row.source,
        "device": row.device,
        "arch": row.arch,
        "recipe": row.recipe,
        "shape": dict(row.shape),
        "steps": {
            "bf16 fwd": row.bf16_fwd_us,
            "scaled fwd": row.scaled_fwd_us,
            "bf16 fwd+bwd": row.bf16_fwd_bwd_us,
            "scaled fwd+bwd": row.scaled_fwd_bwd_us,
        },
        "speedup_fwd_bwd": row.speedup,
        "note": row.note,
        "impossible": row.impossible,
    }
