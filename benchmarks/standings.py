"""From runs to a table: how long each contestant searched, what its picks are worth, how far they agree.

Pure arithmetic on records, no GPU. The regret of a pick is how much slower it is than the best config of the oracle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fp8tune.records import NamedInts
from fp8tune.stats import block_value, median

YARDSTICK = "triton.autotune"
"""The contestant whose wall time the others are measured by."""


@dataclass(frozen=True)
class Run:
    """One search by one contestant, in a process of its own."""

    contestant: str
    number: int
    """0 has a cold compile cache; the later ones find that run's binaries, and are there for their picks alone."""
    process_s: float
    """From the start of the process to its end."""
    search_s: float | None = None
    """The search alone, without imports and inputs; None where there is no pick."""
    pick: NamedInts | None = None
    timed: int | None = None
    """Configs that the contestant timed."""
    failure: str = ""
    """Why there is no pick."""


@dataclass(frozen=True)
class Oracle:
    """The true times of the configs, as far as a long timing gives them."""

    times_us: Mapping[NamedInts, float]
    noise: float
    """Median over the configs of how far two halves of the rounds differ: 0.001 is 0.1 %."""

    @classmethod
    def of_rounds(cls, rounds_us: Mapping[NamedInts, Sequence[float]]) -> Oracle:
        """From the values of at least two rounds of each config: a config's time is their 25 % trimmed mean."""
        halves = [(block_value(values[::2]), block_value(values[1::2])) for values in rounds_us.values()]
        return cls(
            times_us={config: block_value(values) for config, values in rounds_us.items()},
            noise=median(abs(one / other - 1) for one, other in halves),
        )

    @property
    def best(self) -> NamedInts:
        """The fastest config."""
        return min(self.times_us, key=self.times_us.__getitem__)

    def regret(self, pick: NamedInts | None) -> float | None:
        """0.01 for a pick 1 % slower than the best; None for a config that was not timed."""
        if pick is None or pick not in self.times_us:
            return None
        return self.times_us[pick] / self.times_us[self.best] - 1


@dataclass(frozen=True)
class Standing:
    """One line of the table."""

    contestant: str
    cold: Run
    """The run with the cold compile cache."""
    search_ratio: float | None
    """The yardstick's search over this one's, both cold: 8 is eight times less wall time."""
    process_ratio: float | None
    picks: tuple[tuple[NamedInts, int], ...]
    """The picks of all runs with how often, the most frequent first."""
    regrets: tuple[float, ...]
    """Of every run's pick that the oracle timed."""


def standings(runs: Iterable[Run], oracle: Oracle | None) -> list[Standing]:
    """A standing for each contestant that ran, in order of its first run. Regrets wait for the oracle."""
    by_contestant: dict[str, list[Run]] = {}
    for run in runs:
        by_contestant.setdefault(run.contestant, []).append(run)
    yardstick = by_contestant.get(YARDSTICK, [None])[0]
    return [_standing(own, yardstick, oracle) for own in by_contestant.values()]


def _standing(own: Sequence[Run], yardstick: Run | None, oracle: Oracle | None) -> Standing:
    cold = own[0]
    regrets = [oracle.regret(run.pick) for run in own] if oracle else []
    return Standing(
        contestant=cold.contestant,
        cold=cold,
        search_ratio=_ratio(yardstick.search_s, cold.search_s) if yardstick else None,
        process_ratio=_ratio(yardstick.process_s, cold.process_s)
        if yardstick and yardstick.pick and cold.pick
        else None,
        picks=tuple(Counter(run.pick for run in own if run.pick is not None).most_common()),
        regrets=tuple(regret for regret in regrets if regret is not None),
    )


def _ratio(theirs_s: float | None, own_s: float | None) -> float | None:
    return theirs_s / own_s if theirs_s and own_s else None


HEADINGS = (
    "contestant",
    "search s",
    "less",
    "process s",
    "less",
    "timed",
    "pick",
    "regret %",
    "runs",
    "picks",
    "mean regret %",
    "worst %",
)


def table(lines: Sequence[Standing], oracle: Oracle | None) -> str:
    """The standings side by side as text; contestants without a pick have their reason instead of figures."""
    rows = [HEADINGS, *(_cells(line, oracle) for line in lines if line.cold.pick is not None)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    text += [f"{line.contestant}: {line.cold.failure}" for line in lines if line.cold.pick is None]
    if oracle:
        text.append(
            f"best of the oracle: {config_text(oracle.best)} at {oracle.times_us[oracle.best]:.2f} us; "
            f"its halves differ by {100 * oracle.noise:.2f} % (median of {len(oracle.times_us)} configs)"
        )
    return "\n".join(text)


def _cells(line: Standing, oracle: Oracle | None) -> tuple[str, ...]:
    cold, regrets = line.cold, line.regrets
    return (
        line.contestant,
        _number(cold.search_s, 1),
        _number(line.search_ratio, 1, "x"),
        _number(cold.process_s, 1),
        _number(line.process_ratio, 1, "x"),
        str(cold.timed),
        config_text(cold.pick),
        _percent(oracle.regret(cold.pick) if oracle else None),
        str(sum(count for _, count in line.picks)),
        str(len(line.picks)),
        _percent(sum(regrets) / len(regrets) if regrets else None),
        _percent(max(regrets, default=None)),
    )


def config_text(config: NamedInts | None) -> str:
    """``32/128/4/1``: the values in the order of the axes."""
    return "/".join(str(value) for value in config.values()) if config else "-"


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"
