"""What the sweep's picks hold, on the simulated GPU: stable, close to the best, and never a loss against the default.

    python -m benchmarks.targets                              # 1,000 tables of 20 rows, about ten minutes on two cores
    python -m benchmarks.targets --tables 50 --process-sd 0.002
    python -m benchmarks.targets --device "NVIDIA H100 80GB HBM3"    # its calibrated noise, and the protocol for it

Every row is a new problem that is swept twice from scratch, and once more with the first pick as the committed table's
entry. True times are known, so the oracle is exact. Exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
from scipy.stats import binomtest

from benchmarks.simulation import World, sweep
from fp8tune.choose.calibration import BLOCK_SD, PROCESS_SD, measuring_plan_of
from fp8tune.choose.decision import MeasuringPlan
from fp8tune.measure.simulated import MEASURED, Noise
from fp8tune.measure.worker import usable_cores

ROWS = 20
"""Rows of a table."""


@dataclass(frozen=True)
class Row:
    """One problem. Slowdowns are shares, from true times."""

    is_kept: bool
    """The sweep with the committed table gives the same pick."""
    is_agreed: bool
    """Two sweeps from scratch give the same pick."""
    disagreement: float
    """How far apart their picks are."""
    regret: float
    against_default: float
    processes: int


@dataclass(frozen=True)
class Target:
    """One line of the report. ``bound``: what the measured value is at worst, at 97.5 %."""

    name: str
    asked: str
    measured: str
    bound: str
    is_met: bool


def main() -> int:
    """Sweep, judge, print; the exit code."""
    arguments = _parser().parse_args()
    given = {name: value for name in NOISES if (value := getattr(arguments, name)) is not None}
    noise = replace(MEASURED[arguments.device] if arguments.device else Noise(), **given)
    spreads = {PROCESS_SD: noise.process_sd, BLOCK_SD: noise.block_sd}
    protocol = measuring_plan_of(spreads) if arguments.device else MeasuringPlan()
    seeds = [(arguments.seed, number) for number in range(arguments.tables)]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        tables = list(pool.map(partial(table, noise=noise, protocol=protocol), seeds, chunksize=4))
    targets = judged(tables)
    rows = [row for rows in tables for row in rows]
    print(f"{len(tables)} tables of {ROWS} rows, process sd {noise.process_sd:.2%}, block sd {noise.block_sd:.2%},")
    print(f"drift {noise.drift_sd:.2%}; {np.mean([row.processes for row in rows]):.1f} processes a row from scratch")
    print(f"{'target':48} {'asked':>10} {'measured':>10} {'at worst':>10}")
    for target in targets:
        missed = "" if target.is_met else "  MISSED"
        print(f"{target.name:48} {target.asked:>10} {target.measured:>10} {target.bound:>10}{missed}")
    return 0 if all(target.is_met for target in targets) else 1


def table(seed: Sequence[int], noise: Noise, rows: int = ROWS, protocol: MeasuringPlan = MeasuringPlan()) -> list[Row]:
    """The rows of one table: as many independent problems."""
    random = np.random.default_rng(seed)
    return [row(World.draw(random, noise), random, protocol) for _ in range(rows)]


def row(world: World, random: np.random.Generator, protocol: MeasuringPlan) -> Row:
    """Sweep a problem three times and compare with its true times."""
    first, second = (sweep(world, None, random, protocol) for _ in range(2))
    again = sweep(world, first.config, random, protocol)
    return Row(
        is_kept=again.config == first.config,
        is_agreed=second.config == first.config,
        disagreement=abs(math.log1p(world.slowdown(second.config, first.config))),
        regret=world.slowdown(first.config),
        against_default=world.slowdown(first.config, world.default),
        processes=first.processes,
    )


def judged(tables: Sequence[Sequence[Row]]) -> list[Target]:
    """The targets of the protocol, by what the tables say."""
    rows = [row for rows in tables for row in rows]
    regrets = np.array([row.regret for row in rows])
    apart = [row.disagreement for row in rows if not row.is_agreed]
    spare = 1.96 * regrets.std() / math.sqrt(len(regrets))
    kept = sum(all(row.is_kept for row in rows) for rows in tables)
    return [
        _at_least("tables unchanged by a second sweep", 0.98, kept, len(tables)),
        _at_least("rows on which two sweeps from scratch agree", 0.90, sum(row.is_agreed for row in rows), len(rows)),
        _at_most_value("the others' picks apart, at most", 0.0125, math.expm1(max(apart, default=0.0))),
        _at_most_value("regret, mean", 0.005, regrets.mean(), regrets.mean() + spare),
        _at_most_value("regret, 95 of 100 below", 0.0125, *_quantile(regrets, 0.95)),
        _at_most_value("regret, at most", 0.02, regrets.max()),
        _at_most("rows over 1 % slower than the default", 0.01, sum(r.against_default > 0.01 for r in rows), len(rows)),
    ]


def _at_least(name: str, asked: float, count: int, of: int) -> Target:
    low = float(binomtest(count, of).proportion_ci().low)
    return Target(name, f">= {asked:.0%}", f"{count / of:.2%}", f"{low:.2%}", count / of >= asked)


def _at_most(name: str, asked: float, count: int, of: int) -> Target:
    high = float(binomtest(count, of).proportion_ci().high)
    return Target(name, f"<= {asked:.0%}", f"{count / of:.2%}", f"{high:.2%}", count / of <= asked)


def _at_most_value(name: str, asked: float, value: float, bound: float | None = None) -> Target:
    return Target(name, f"<= {asked:.2%}", f"{value:.2%}", "" if bound is None else f"{bound:.2%}", value <= asked)


def _quantile(values: np.ndarray, share: float) -> tuple[float, float]:
    """A quantile and its upper bound, an order statistic."""
    from scipy.stats import binom

    place = min(len(values) - 1, int(binom.ppf(0.975, len(values), share)))
    return float(np.quantile(values, share)), float(np.sort(values)[place])


NOISES = tuple(field.name for field in fields(Noise) if field.name != "samples")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=usable_cores())
    parser.add_argument("--device", choices=MEASURED, help="one that was calibrated")
    for name in NOISES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, help="noise of the simulated GPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
