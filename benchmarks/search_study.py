"""Replay search strategies on recorded trials: how far from the best config of a grid each ends.

    python benchmarks/search_study.py trials.db out/ [STRATEGY...]

The trials are an SQLite file as releases have it, unpacked. A strategy spends a share of the cost of the whole grid:
compiling each config once for all sizes, checking it and timing it on each size. Regret is the time of the best config
that it saw, of the eight that were fastest in their first block, over that of the best config of the grid. Needs
scikit-learn and optuna for two of the strategies, and altair with vl-convert for the picture.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd

from fp8tune.records import NamedInts, Problem
from fp8tune.stats import search
from fp8tune.sweeping.planning import CONFIG_S, CONFIG_S_PER_BYTE

SCENARIOS = ("sweep", "alone", "with another GPU")
SHARES = (0.05, 0.1, 0.2)
SEEDS = range(4)  # one may be lucky: the 95th percentile of the Gaussian process was 7 to 19 %
COMPILERS = 4  # compiling takes a fourth of its time beside the timing: a small machine
LEAST_US, LEAST_CONFIGS = 60.0, 30  # coarse times of shorter launches were the host's; a tenth of fewer configs is none
VISITS, BATCH = 8, 2
QUERY = """
SELECT s.id study, p.kernel, p.shape, p.input_layout layout, d.name device, s.version_id version, s.bytes_moved bytes,
  c.text config, coalesce(r.final_us, r.coarse_us) truth_us, r.compile_s, f.text default_config,
  (SELECT t.time_us FROM trials t WHERE t.result_id = r.id AND t.stage = 'coarse' ORDER BY t.round LIMIT 1) first_us
FROM results r JOIN studies s ON s.id = r.study_id JOIN problems p ON p.id = s.problem_id
  JOIN devices d ON d.id = s.device_id JOIN configs c ON c.id = r.config_id
  JOIN versions v ON v.id = s.version_id JOIN configs f ON f.id = v.default_id
WHERE s.kind = 'measured' AND r.status = 'ok' AND r.coarse_us IS NOT NULL ORDER BY s.id, c.text
"""


def parsed(text: str) -> NamedInts:
    """Return the text of a shape or config as integers."""
    return NamedInts([(name, int(value)) for name, value in (item.split("=") for item in text.split())])


@dataclass(eq=False)
class Size:
    """The whole grid of a kernel on one problem size."""

    kernel: str
    device: str
    version: int
    problem: Problem
    trial_s: float  # checking and timing one config
    default: NamedInts
    first_us: dict[NamedInts, float]
    truth_us: dict[NamedInts, float]
    compile_s: dict[NamedInts, float]

    def regret(self, seen: Iterable[NamedInts]) -> float:
        """Return the regret of the confirmation after a coarse pass of some configs."""
        finalists = [*sorted(seen, key=self.first_us.__getitem__)[:8], self.default]
        return min(self.truth_us[config] for config in finalists) / min(self.truth_us.values()) - 1


def read(path: Path) -> list[Size]:
    """Return the sizes that are long enough for their coarse times, with large enough grids."""
    with sqlite3.connect(path) as connection:
        rows = pd.read_sql(QUERY, connection)
    compile_s = rows.groupby(["kernel", "config"])["compile_s"].max().to_dict()  # others found it compiled
    rows["cold_s"] = [compile_s[item] / COMPILERS for item in zip(rows["kernel"], rows["config"], strict=True)]
    sizes = []
    for _, group in rows.groupby("study"):
        row, configs = group.iloc[0], [*map(parsed, group["config"])]
        default = parsed(row["default_config"])
        if len(group) < LEAST_CONFIGS or group["truth_us"].min() < LEAST_US or default not in configs:
            continue
        problem = Problem(row["kernel"], parsed(row["shape"]), input_layout=row["layout"])
        facts = (row["kernel"], row["device"], row["version"], problem, CONFIG_S + row["bytes"] * CONFIG_S_PER_BYTE)
        times = (dict(zip(configs, group[name], strict=True)) for name in ("first_us", "truth_us", "cold_s"))
        sizes.append(Size(*facts, default, *times))
    return sizes


@dataclass
class Run:
    """A sweep of some sizes by one strategy."""

    sizes: Sequence[Size]
    random: random.Random
    known: Sequence[search.Times] = ()
    compiled: set[NamedInts] = field(default_factory=set)
    spent_s: float = 0.0
    times: list[search.Times] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.times = [search.Times(size.problem, size.device) for size in self.sizes]

    def cost_s(self, index: int, config: NamedInts) -> float:
        """Return what it costs to try a config now."""
        size = self.sizes[index]
        return size.trial_s + (0.0 if config in self.compiled else size.compile_s[config])

    def try_config(self, index: int, config: NamedInts) -> None:
        """Time a config."""
        self.spent_s += self.cost_s(index, config)
        self.compiled.add(config)
        self.times[index].times_us[config] = self.sizes[index].first_us[config]

    def untried(self, index: int) -> list[NamedInts]:
        """Return configs that were not tried, in random order."""
        left = [config for config in self.sizes[index].first_us if config not in self.times[index].times_us]
        self.random.shuffle(left)
        return left

    def others(self, index: int) -> list[search.Times]:
        """Return the times of the other sizes."""
        return [*self.times[:index], *self.times[index + 1 :], *self.known]

    def whole_s(self) -> float:
        """Return the cost of all grids."""
        compiled = {config: size.compile_s[config] for size in self.sizes for config in size.compile_s}
        return sum(compiled.values()) + sum(size.trial_s * len(size.first_us) for size in self.sizes)

    def regrets(self) -> list[float]:
        """Return the regret of each size."""
        return [size.regret(times.times_us) for size, times in zip(self.sizes, self.times, strict=True)]


Strategy = Callable[[Run, int], list[NamedInts]]


def winners(run: Run, index: int) -> list[NamedInts]:
    """Take the best configs of other sizes, then those that differ from the best so far on one axis, then any."""
    untried, votes = run.untried(index), defaultdict[NamedInts, float](float)
    for times in run.others(index):
        for rank, config in enumerate(sorted(times.times_us, key=times.times_us.__getitem__)[:3], start=1):
            votes[config] += 1 / rank
    own = run.times[index].times_us
    best = sorted(own, key=own.__getitem__)[:2]

    def order(config: NamedInts) -> tuple[float, int]:
        steps = (sum(config[axis] != near.get(axis) for axis in config) for near in best)
        return -votes[config], min(steps, default=0) > 1

    return sorted(untried, key=order)[:BATCH]


def forest(run: Run, index: int) -> list[NamedInts]:
    """Take the lowest mean less one deviation of a random forest on axes and dims."""
    from sklearn.ensemble import RandomForestRegressor  # type: ignore[import-not-found]

    def row(times: search.Times, config: NamedInts) -> list[float]:
        return [*np.log2([value + 1.0 for value in (*config.values(), *times.problem.shape.values())])]

    rows, logs = list[list[float]](), list[float]()
    for times in (run.times[index], *run.others(index)):
        values = np.log([*times.times_us.values()])
        rows += [row(times, config) for config in times.times_us]
        logs += [*(values - np.median(values))] if len(values) else []
    untried = run.untried(index)
    if len(rows) < 4 or not untried:
        return untried[:BATCH]
    model = RandomForestRegressor(15, random_state=run.random.randrange(2**31), max_features=0.6).fit(rows, logs)
    new = np.array([row(run.times[index], config) for config in untried])
    trees = np.array([tree.predict(new) for tree in model.estimators_])
    return [untried[place] for place in np.argsort(trees.mean(axis=0) - trees.std(axis=0))[:BATCH]]


def tpe(run: Run, index: int) -> list[NamedInts]:
    """Ask Optuna's TPE sampler, which knows the times of this size."""
    import optuna  # type: ignore[import-not-found]

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    untried, own = run.untried(index), run.times[index].times_us
    values = {axis: sorted({config[axis] for config in run.sizes[index].first_us}) for axis in next(iter(own))}
    ranges = {axis: optuna.distributions.IntDistribution(0, len(options) - 1) for axis, options in values.items()}
    sampler = optuna.samplers.TPESampler(seed=run.random.randrange(2**31), n_startup_trials=4, multivariate=True)
    study = optuna.create_study(sampler=sampler)
    for config, time_us in own.items():
        params = {axis: options.index(config[axis]) for axis, options in values.items()}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=ranges, value=time_us))
    left, chosen = set(untried), list[NamedInts]()
    for _ in range(10):  # it may ask for what is pruned, or was tried
        params = study.ask(ranges).params
        config = NamedInts({axis: values[axis][params[axis]] for axis in values})
        if config in left:
            left.discard(config)
            chosen.append(config)
    return [*chosen, *(config for config in untried if config in left)][:BATCH]


def process(run: Run, index: int) -> list[NamedInts]:
    """Take the largest expected improvement of the Gaussian process that sweeps use."""
    return search.proposals(BATCH, run.untried(index), run.times[index], run.others(index), run.compiled)


def spend(run: Run, strategy: Strategy, share: float) -> list[float]:
    """Spend a share of the cost of the grids, equally on each size and visit. Returns the regrets."""
    budget_s = share * run.whole_s()
    for visit in range(VISITS):
        for index, size in enumerate(run.sizes):
            left = (VISITS - visit) * len(run.sizes) - index
            until_s = run.spent_s + (budget_s - run.spent_s) / left
            if size.default not in run.times[index].times_us:
                run.try_config(index, size.default)
            while run.spent_s < until_s and (batch := strategy(run, index)):
                for config in batch:
                    run.try_config(index, config)
    return run.regrets()


def in_order(run: Run, strategy: Strategy, share: float) -> list[float]:
    """Time size by size until the budget ends, as a sweep without a search does."""
    budget_s = share * run.whole_s()
    for index, size in enumerate(run.sizes):
        for config in (size.default, *run.untried(index)):
            if run.spent_s < budget_s and config not in run.times[index].times_us:
                run.try_config(index, config)
    return run.regrets()


STRATEGIES: dict[str, tuple[Strategy, Callable[..., list[float]]]] = {
    "order until now": (lambda run, index: run.untried(index)[:BATCH], in_order),
    "random": (lambda run, index: run.untried(index)[:BATCH], spend),
    "winners": (winners, spend),
    "TPE": (tpe, spend),
    "random forest": (forest, spend),
    "Gaussian process": (process, spend),
}


def replay(sizes: Sequence[Size], name: str, share: float, scenario: str, seed: int) -> pd.DataFrame:
    """Return the regret of each size: of ``sweep``, ``alone``, or ``with another GPU`` whose times are known."""
    sweeps, rows = defaultdict[tuple[str, str, int], list[Size]](list), list[tuple[str, float]]()
    for size in sizes:
        sweeps[size.kernel, size.device, size.version].append(size)
    strategy, spender = STRATEGIES[name]
    for (kernel, device, version), group in sweeps.items():
        chance = random.Random(zlib.crc32(f"{kernel} {device} {version} {seed}".encode()))
        group = chance.sample(group, len(group))
        known = [size for size in sizes if size.kernel == kernel and size.device != device]
        if scenario == "with another GPU" and known:
            times = [search.Times(size.problem, size.device, dict(size.first_us)) for size in known]
            rows += [(kernel, regret) for regret in spender(Run(group, chance, times), strategy, share)]
        elif scenario == "alone":
            for size in group[:4]:
                rows += [(kernel, regret) for regret in spender(Run([size], chance), strategy, share)]
        elif scenario == "sweep" and len(group) > 2:
            rows += [(kernel, regret) for regret in spender(Run(group, chance), strategy, share)]
    return pd.DataFrame(rows, columns=["kernel", "regret"]).assign(strategy=name, share=share, scenario=scenario)


def main(path: Path, out: Path, names: Iterable[str] = STRATEGIES) -> None:
    """Replay strategies and write all regrets."""
    sizes, frames = read(path), list[pd.DataFrame]()
    kernels = sorted({size.kernel for size in sizes})
    print(f"{len(sizes)} sizes of {len(kernels)} kernels")
    out.mkdir(exist_ok=True)
    for scenario, share, name in itertools.product(SCENARIOS, SHARES, names):
        frame = pd.concat(replay(sizes, name, share, scenario, seed) for seed in SEEDS)
        frame["held_out"] = frame["kernel"].isin(kernels[1::2])
        frames.append(frame)
        for held_out, rows in frame.groupby("held_out"):
            middle, high = 100 * rows["regret"].quantile([0.5, 0.95])
            print(f"{scenario:16} {name:17} {share:4.0%} {held_out!s:5} {len(rows):4} {middle:6.2f} {high:6.2f}")
        sys.stdout.flush()
        pd.concat(frames).to_csv(out / "regrets.csv", index=False)
    chart(pd.concat(frames)).save(out / "search.svg")


def chart(regrets: pd.DataFrame) -> alt.LayerChart | alt.FacetChart:
    """Draw the regret of sweeps on held-out kernels at a tenth of the cost: medians and 95th percentiles."""
    rows = regrets[regrets["held_out"] & (regrets["scenario"] == "sweep") & (regrets["share"] == 0.1)]
    table = 100 * rows.groupby("strategy")["regret"].quantile(np.array([0.5, 0.95])).unstack()
    data = table.set_axis(["median", "high"], axis=1).reset_index()
    y = alt.Y("strategy:N", title=None, sort=alt.SortField("median"))
    x = alt.X("median:Q", title="slower than the best of all, in %", scale=alt.Scale(type="symlog", constant=1))
    base = alt.Chart(data).encode(y=y)
    line = base.mark_rule(color="#999").encode(x=x, x2="high:Q")
    middle = base.mark_point(filled=True, size=60, color="#1f77b4", opacity=1).encode(x=x)
    high = base.mark_tick(color="#d62728", thickness=2).encode(x=alt.X("high:Q"))
    return alt.layer(line, middle, high).properties(width=420, height=150)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or STRATEGIES)
