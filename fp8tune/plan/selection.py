"""Rows of shape sets and how their problem sizes are made: ``llama4,K=5120,routing=zipf``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fp8tune.errors import UsageError, unknown
from fp8tune.plan import shapes
from fp8tune.records import NamedInts
from fp8tune.text import NAME
from fp8tune_kernels.spec import DTYPES, ROUTINGS

LARGEST_SEED = 2**63 - 1  # what the database and torch hold


@dataclass(frozen=True)
class Settings:
    """Facts of problem sizes that are not sizes. An empty text is the kernel's own choice."""

    routing: str = ""
    """How rows spread over groups."""
    dtype: str = ""
    layout: str = ""
    scale: str = ""
    """How scales are rounded."""
    seed: int = 0
    groups: str = ""
    """File with the rows of each group, one number per line; only ``bench`` takes one."""

    @classmethod
    def parse(cls, values: Mapping[str, Any], origin: str) -> Settings:
        """Check values. Raises UsageError that starts with their origin."""
        texts = {name: str(value) for name, value in values.items()}
        if not texts.get("seed", "0").isdecimal() or int(texts.get("seed", "0")[:30]) > LARGEST_SEED:
            raise UsageError(f"{origin}: seed must be from 0 to 2^63 - 1, got {texts['seed']:.40}")
        for name, known in (("routing", ROUTINGS), ("dtype", DTYPES)):
            if texts.get(name, known[0]) not in known:
                raise unknown(name, texts[name], known)
        return cls(**{**texts, "seed": int(texts.get("seed", "0"))})  # type: ignore[arg-type]


NAMES = frozenset(Settings.__dataclass_fields__)


@dataclass(frozen=True)
class Selection:
    """Rows of one shape set, the sizes that are kept of them, and settings."""

    rows: tuple[NamedInts, ...]
    names: Mapping[NamedInts, str] = field(default_factory=dict)
    """Names of the rows that have one."""
    size: NamedInts = field(default_factory=NamedInts)
    """Sizes that a problem size must have; a dim that it lacks is looked up in its row."""
    settings: Settings = field(default_factory=Settings)


def parse(text: str) -> Selection:
    """Read ``SET[,NAME=VALUE...]``. Raises UsageError for an unknown set, setting or value."""
    name, *items = text.split(",")
    if "=" in name:
        raise UsageError(f"--shapes {text!r:.80} names no shape set: write llama4,{text:.60}")
    shape_set, origin = shapes.load(name), f"--shapes {text!r:.80}"
    size: dict[str, int] = {}
    settings: dict[str, Any] = dict(shape_set.settings)
    for item in items:
        key, equals, value = item.partition("=")
        if key in NAMES and value:
            settings[key] = value
        elif equals and NAME.fullmatch(key) and value.isascii() and value.isdecimal() and len(value) < 19:
            size[key] = int(value)
        elif equals and value:
            raise unknown("setting", key, NAMES)
        else:
            raise UsageError(f"{origin}: {item!r:.40} is not NAME=VALUE, such as K=5120 or routing=zipf")
    return Selection(shape_set.rows, shape_set.names, NamedInts(size), Settings.parse(settings, origin))


def common_settings(selections: Iterable[Selection]) -> Settings:
    """Return the settings that all selections share. Raises UsageError if they differ."""
    settings = list(dict.fromkeys(selection.settings for selection in selections)) or [Settings()]
    if len(settings) > 1:
        raise UsageError("--shapes with different routing, dtype, layout, scale or seed: run one command for each")
    return settings[0]
