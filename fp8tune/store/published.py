"""A CSV of what others printed of a grouped GEMM, forward and backward, beside bf16. No line is left out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fp8tune.errors import unknown
from fp8tune.records import Device, Published
from fp8tune.store import csv_fields
from fp8tune.store.columns import ARCH, UNSTATED, WORD
from fp8tune_kernels.arches import ARCHES

OPERATION = "grouped-mm"
"""What all lines are of; the recipe tells them apart."""

TIMES = ("bf16_fwd_bwd_us", "scaled_fwd_bwd_us", "bf16_fwd_us", "scaled_fwd_us")
COLUMNS = ("source", "device", "arch", "recipe", "shape", *TIMES, "note")

NOT_STATED = "not stated"
"""What stands for an arch that a publication does not name."""


def is_of_operations(path: Path) -> bool:
    """Whether a CSV holds these rows, and not those of kernels. Raises UsageError where it is no CSV."""
    return "recipe" in csv_fields.header(path)


def read(path: Path) -> list[Published]:
    """The lines of a CSV with :data:`COLUMNS`. Raises UsageError naming file and line."""
    return csv_fields.read(path, COLUMNS, _published)


def _published(fields: Mapping[str, str]) -> Published:
    """One line. Raises UsageError or ValueError saying what is wrong with it."""
    return Published(
        operation=OPERATION,
        shape=csv_fields.shape(fields["shape"]),
        recipe=_recipe(fields["recipe"]),
        device=Device(_arch(fields["arch"]), csv_fields.line("device", fields["device"])),
        source=csv_fields.source(fields["source"]),
        note=csv_fields.line("note", fields["note"]),
        **{name: csv_fields.microseconds(name, fields[name]) for name in TIMES},
    )


def _recipe(text: str) -> str:
    if not text or not WORD.fullmatch(text):
        raise ValueError(f"recipe is {text[:80]!r}, not one word such as mxfp8")
    return text


def _arch(text: str) -> str:
    if text == NOT_STATED:
        return UNSTATED
    if not ARCH.fullmatch(text):
        raise unknown("arch", text[:80], ARCHES)
    return text
