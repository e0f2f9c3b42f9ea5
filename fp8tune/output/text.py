"""Text of numbers, sizes and configs, the same in all screens."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from math import floor, log10
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from fp8tune.records import RECORDED

_LAUNCH = {"num_warps": "w", "num_stages": "s", "maxnreg": "r"}
_RESERVED = ("x", *_LAUNCH.values())


def mean(values: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the values that are known."""
    known = [value for value in values if value]
    return geometric_mean(known) if known else None


def microseconds(time_us: float | None) -> str:
    """Return a time with four digits, such as ``41.77`` or ``1,161``."""
    if not time_us or time_us < 0:
        return "-"
    return f"{time_us:,.{max(0, 3 - floor(log10(time_us)))}f}" if time_us >= 0.001 else f"{time_us:.1g}"


def ratio(value: float | None, in_use: bool = False) -> str:
    """Return a speedup, such as ``1.31x``."""
    return "in use" if in_use else f"{value:.2f}x" if value else "-"


def percent(share: float | None, digits: int = 0) -> str:
    """Return a share without its sign, such as ``60``."""
    return "-" if share is None else f"{100 * share:.{digits}f}"


def duration(seconds: float) -> str:
    """Return a duration such as ``32 s``, ``3 min 32 s`` or ``2 h 5 min``."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def counted(number: int, noun: str) -> str:
    """Return ``1 size``, ``2 sizes`` or ``3 processes``."""
    plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def listed(names: Iterable[str], word: str = "and") -> str:
    """Return ``a, b and c``."""
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last


def counts(words: Mapping[Any, int]) -> str:
    """Return ``5 proven, 1 open``, without what does not occur."""
    return ", ".join(f"{count:,} {word}" for word, count in words.items() if count)


def layout(name: str) -> str:
    """Return an input layout; of a recorded launch the first digits of its id, such as ``e9f809``."""
    return name[len(RECORDED) :][:6] if name.startswith(RECORDED) else name


def pairs(values: Mapping[str, object]) -> str:
    """Return sizes or a config as ``M=16640 K=5120``."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def short_gpu(name: str) -> str:
    """Return the first word with a digit: ``H100`` of ``NVIDIA H100 80GB HBM3``."""
    return next((word for word in name.split() if any(map(str.isdigit, word))), name)


def path_here(path: Path) -> str:
    """Return a path as one would type it: relative if it is below this folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def command(*words: str | None, db: str | None = None) -> str:
    """Return a command to type next, without words that are None: ``fp8tune show ops:softmax --db results.db``."""
    return shlex.join(["fp8tune", *filter(None, words), *([] if db is None else ["--db", db])])


def split_shared(rows: Sequence[Mapping[str, object]]) -> tuple[dict[str, object], list[str]]:
    """Return the values that all rows share, and the names that differ. A single row shares nothing."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    shared = {name: rows[0][name] for name in names if len(rows) > 1 and len({row.get(name) for row in rows}) == 1}
    return shared, [name for name in names if name not in shared]


def config_texts(configs: Iterable[Mapping[str, int] | None], *, spelled: bool = False) -> tuple[list[str], str]:
    """Return configs as texts, such as ``64x256 L192 w4``, and the line that names the axes.

    Axes that all configs share are in that line alone. ``spelled`` writes ``LEAD=192``.
    """
    configs = list(configs)
    known = [config for config in configs if config]
    shared, names = split_shared(known)
    # A group of block axes is read as a whole, so it stays whole if one of them differs.
    blocks = list(dict.fromkeys(name for config in known for name in config if name.startswith("BLOCK")))
    blocks = blocks if set(blocks) & set(names) else []
    shared = {name: value for name, value in shared.items() if name not in blocks}
    own = [name for name in names if name not in blocks and name not in _LAUNCH]
    initials = {name: f"{name}=" if spelled else _initial(name, own) for name in own}
    initials |= {name: initial for name, initial in _LAUNCH.items() if name in names}
    if spelled and "maxnreg" in initials:
        initials["maxnreg"] = "maxnreg="

    def text(config: Mapping[str, int] | None) -> str:
        if not config:
            return "not published" if config is None else "no axes"
        parts = ["x".join(str(config.get(name, "?")) for name in blocks)] if blocks else []
        parts += [f"{initial}{config.get(name, '?')}" for name, initial in initials.items()]
        return " ".join(parts) or "as below"

    named = [" x ".join(blocks)] if blocks else []
    named += [f"{initial} {name}" for name, initial in initials.items() if not initial.endswith("=")]
    legend = "; ".join(filter(None, [", ".join(named), f"all {pairs(shared)}" if shared else ""]))
    return list(map(text, configs)), f"config: {legend}" if legend else ""


def _initial(name: str, axes: Sequence[str]) -> str:
    """Return the shortest prefix that no other axis has, or ``NAME=`` if there is none that ends in a letter."""
    others = [*_RESERVED, *(axis for axis in axes if axis != name)]
    prefixes = (name[:end] for end in range(1, len(name) + 1))
    free = (text for text in prefixes if text not in _RESERVED and not any(axis.startswith(text) for axis in others))
    prefix = next(free, "")
    return f"{name}=" if not prefix or prefix[-1].isdigit() else prefix
