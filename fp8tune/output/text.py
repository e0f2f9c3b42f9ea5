"""Text of numbers, sizes and configs, the same in all screens."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from pathlib import Path
from statistics import geometric_mean

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


def clock(seconds: float) -> str:
    """Return a duration as ``1:20`` or ``2:03:10``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def counted(number: int, noun: str) -> str:
    """Return ``1 size``, ``2 sizes`` or ``3 processes``."""
    plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def listed(names: Iterable[str], word: str = "and") -> str:
    """Return ``a, b and c``."""
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last


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


def db_option(db: str | None) -> str:
    """Return `` --db NAME`` for a command to type next; empty if no database was named."""
    return f" --db {shlex.quote(db)}" if db is not None else ""


def split_shared(rows: Sequence[Mapping[str, object]]) -> tuple[dict[str, object], list[str]]:
    """Return the values that all rows share, and the names that differ. A single row shares nothing."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    shared = {name: rows[0][name] for name in names if len(rows) > 1 and len({row.get(name) for row in rows}) == 1}
    return shared, [name for name in names if name not in shared]


@dataclass(frozen=True)
class ConfigNames:
    """Short names of the axes that differ between the configs of one table."""

    blocks: Sequence[str]
    others: Sequence[str]
    shared: Mapping[str, object]
    spelled: bool = False
    """True writes axes other than warps and stages as ``NAME=value``."""

    @classmethod
    def from_configs(cls, configs: Iterable[Mapping[str, int] | None], *, spelled: bool = False) -> ConfigNames:
        """Name the axes of all configs. Axes that all share are named once, in the legend."""
        known = [config for config in configs if config]
        shared, names = split_shared(known)
        # A group of block axes is read as a whole, so it stays whole if one of them differs.
        blocks = list(dict.fromkeys(name for config in known for name in config if name.startswith("BLOCK")))
        blocks = blocks if set(blocks) & set(names) else []
        others = [name for name in names if name not in blocks and name not in _LAUNCH]
        others += [name for name in _LAUNCH if name in names]
        return cls(blocks, others, {name: value for name, value in shared.items() if name not in blocks}, spelled)

    def initial(self, name: str) -> str:
        """Return the shortest prefix that no other axis has, or ``NAME=`` if there is none."""
        if name in _LAUNCH and not (self.spelled and name == "maxnreg"):
            return _LAUNCH[name]
        rivals = [*_RESERVED, *(axis for axis in self.others if axis != name and axis not in _LAUNCH)]
        prefixes = (name[:end] for end in range(1, len(name) + 1))
        unique = (p for p in prefixes if p not in _RESERVED and not any(rival.startswith(p) for rival in rivals))
        prefix = next(unique, "")
        return f"{name}=" if self.spelled or not prefix or prefix[-1].isdigit() else prefix

    def short(self, config: Mapping[str, int] | None) -> str:
        """Return a config as text, such as ``64x256 L192 w4``."""
        if not config:
            return "not published" if config is None else "no axes"
        parts = ["x".join(str(config.get(name, "?")) for name in self.blocks)] if self.blocks else []
        parts += [f"{self.initial(name)}{config.get(name, '?')}" for name in self.others]
        return " ".join(parts) or "as below"

    @property
    def legend(self) -> str:
        """One line that names the axes, and the values that all configs share."""
        names = [" x ".join(self.blocks)] if self.blocks else []
        initials = {name: self.initial(name) for name in self.others}
        names += [f"{initial} {name}" for name, initial in initials.items() if not initial.endswith("=")]
        parts = [", ".join(names), f"all {pairs(self.shared)}" if self.shared else ""]
        return "config: " + "; ".join(filter(None, parts)) if any(parts) else ""
