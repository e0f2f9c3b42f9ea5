"""Rules for names and numbers that come from files and databases."""

from __future__ import annotations

import functools
import json
import keyword
import math
import re

from fp8tune.errors import DatabaseError
from fp8tune.records import Kind, NamedInts, Status
from fp8tune.stats.study import Verdict
from fp8tune.text import KERNEL_NAME, NAME, WORD, visible

UNSTATED = "unstated"
"""Stands for a routing, scale mode or dtype that a publication does not name."""

LARGEST = 2**63 - 1
LARGEST_DIM = 2**31 - 1  # ends of groups are int32
LARGEST_DOCUMENT = 2**20
ARCH = re.compile(r"[a-z][a-z0-9_]{1,31}")

_INTEGER = re.compile(r"0|[1-9][0-9]{0,18}")
_WORDS = ("source_hash", "routing", "input_layout", "in_dtype", "fp8_dtype", "scale_mode")
_CHOICES = {"kind": Kind, "status": Status, "verdict": Verdict}
_PATTERNS = {"kernel": KERNEL_NAME, "arch": ARCH, **dict.fromkeys(_WORDS, WORD)}
_PATTERNS |= {name: re.compile("|".join(choices)) for name, choices in _CHOICES.items()}


@functools.lru_cache(8192)  # trials repeat a few hundred configs
def parse_named_ints(text: str) -> NamedInts:
    """Parse ``BLOCK_SIZE=32 num_warps=4``.

    Raises:
        ValueError: The text holds anything but identifiers with integers below 2^63.
    """
    items: dict[str, int] = {}
    for pair in text.split(" ") if text else ():
        name, equals, value = pair.partition("=")
        if not equals or not NAME.fullmatch(name) or keyword.iskeyword(name) or not _INTEGER.fullmatch(value):
            raise ValueError(f"{pair[:80]!r} is not name=integer")
        if int(value) > LARGEST:
            raise ValueError(f"{name}={value} is larger than 2^63 - 1")
        if name in items:
            raise ValueError(f"{name} is given twice")
        items[name] = int(value)
    return NamedInts(items)


def check_sizes(shape: NamedInts) -> None:
    """Raise ValueError unless tensors can have these sizes."""
    if not shape:
        raise ValueError("the shape is empty: write it as name=value pairs, such as M=16640 K=5120 G=64")
    for name, size in shape.items():
        if not 0 <= size <= LARGEST_DIM:
            raise ValueError(f"{name}={size} is larger than {LARGEST_DIM}")
    if math.prod(shape.values()) > LARGEST:
        raise ValueError(f"the product of {shape} is larger than 2^63 - 1")


@functools.lru_cache(8192)
def check_text(column: str, text: str) -> None:
    """Raise DatabaseError for a text that may not be shown, or is no name of its column's kind."""
    pattern = _PATTERNS.get(column)
    if not (visible(text) == text if pattern is None else pattern.fullmatch(text)):
        raise DatabaseError(f"refused {column.replace('_', ' ')} {text[:80]!a}: it holds unexpected characters")


def parse_axes(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Parse a declared grid: ``[["BLOCK_SIZE", [32, 64]], ...]``. Raises ValueError or TypeError."""
    axes = tuple((name, tuple(values)) for name, values in json.loads(text))
    if not all(NAME.fullmatch(name) and all(type(v) is int and 0 <= v <= LARGEST for v in vs) for name, vs in axes):
        raise ValueError("not a grid of names and integers")
    return axes


def parse_document(text: str) -> dict[str, object]:
    """Parse a JSON object of at most one MiB. Raises DatabaseError if it is too long, nested too deep, or no object."""
    if len(text) <= LARGEST_DOCUMENT:
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        if isinstance(document, dict):
            return document
    raise DatabaseError(f"refused {text[:80]!a}: that is no JSON object of at most {LARGEST_DOCUMENT} bytes")
