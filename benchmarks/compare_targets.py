"""``compare``'s error rates on the simulated GPU: false alarms of A..A, and how many slowdowns of 2 % it finds.

    python -m benchmarks.compare_targets [--runs 2000] [--seed 0]
    python -m benchmarks.compare_targets --process-sd 0.006 --drift-sd 0.012 --bimodal-share 0.05    # one line of noise
    python -m benchmarks.compare_targets --common    # the mean over rows

Prints the tables of docs/compare.md. The noise, the order of blocks and the statistics are fp8tune's own; workers,
checkouts and samples are left out (a block's value is drawn with the scatter that its trimmed mean would have).
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.stats import binomtest

from fp8tune.compare import verdicts
from fp8tune.compare.timing import AFTER, BEFORE, BLOCKS, CONTROL, ORDERS
from fp8tune.compare.verdicts import ChangeVerdict
from fp8tune.measure.simulated import MEASURED, Noise
from fp8tune.stats import Estimate

ROWS = 20
SLOWDOWN = 0.02
PROCESS_SDS = (0.001, 0.002, 0.003, 0.004, 0.006)
DRIFT_SDS = (0.0, 0.012)
BIMODAL_SHARES = (0.0, 0.05)
"""Of rows whose kernel has a second mode, 1.5 % slower, that 30 % of processes are in."""
H200 = replace(MEASURED["NVIDIA H200"], drift_sd=0.002, throttle_share=0, stall_share=0)
"""A device that holds still: what rows have in common shows best beside little noise."""
TRIMMED_SPREAD = 1.1
"""Standard error of the 25 % trimmed mean of normal samples, over that of their mean."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """How one simulated comparison ended."""

    verdicts: tuple[ChangeVerdict, ...]
    is_stable: bool
    overall: Estimate


@dataclass(frozen=True)
class Common:
    """What blocks have in common beside their worker's level."""

    arm_sd: float = 0.0
    """Of a draw an arm, the same in all rounds and rows of a run: rounds do not show it."""
    places: tuple[float, ...] = (0.0,) * 6
    """Log time that each of the six turns adds to its block."""


def run(random: Generator, noise: Noise, changes: Floats, common: Common = Common()) -> Run:
    """One comparison whose rows really change by ``changes``, (row,) log ratios: stage 1, stage 2, verdicts."""
    bimodal = random.random(len(changes)) < noise.bimodal_share
    arms = common.arm_sd * random.standard_normal(3)
    first = Rounds(random, noise, bimodal, changes, arms, common.places).draw(range(verdicts.STAGE_ONE_ROUNDS))
    effects = [verdicts.paired(logs) for logs in first[0]]
    left_open = [row for row, effect in enumerate(effects) if verdicts.is_open(effect)]
    numbers = range(verdicts.STAGE_ONE_ROUNDS, verdicts.STAGE_ONE_ROUNDS + verdicts.STAGE_TWO_ROUNDS)
    second = Rounds(random, noise, bimodal[left_open], changes[left_open], arms, common.places).draw(numbers)
    final = dict(zip(left_open, [verdicts.paired(logs) for logs in second[0]], strict=True))
    ended = [
        verdicts.judge(final[row], len(left_open)) if row in final else verdicts.judge(effect)
        for row, effect in enumerate(effects)
    ]
    cleared = [[logs for row, logs in enumerate(rows) if row not in final] for rows in first]
    change, control = ([stage for stage in stages if stage] for stages in zip(cleared, second, strict=True))
    looked_at = len(first[1]) + len(second[1])
    each = all(verdicts.is_stable(verdicts.paired(logs), looked_at) for stage in control for logs in stage)
    is_stable = each and verdicts.is_stable(verdicts.geomean(control))
    return Run(tuple(ended), is_stable, verdicts.all_rows(change, control))


@dataclass(frozen=True, eq=False)
class Rounds:
    """Rounds of some rows, drawn."""

    random: Generator
    noise: Noise
    bimodal: NDArray[np.bool_]
    changes: Floats
    arms: Floats
    """What each arm adds in all rounds."""
    places: tuple[float, ...]

    def draw(self, numbers: range) -> tuple[list[list[float]], list[list[float]]]:
        """Log ratios of change and control: for each row a list, a round an entry."""
        logs = np.array([self._round(number) for number in numbers]).reshape(len(numbers), 3, len(self.changes))
        change, control = logs[:, AFTER] - logs[:, BEFORE], logs[:, CONTROL] - logs[:, BEFORE]
        return change.T.tolist(), control.T.tolist()

    def _round(self, number: int) -> Floats:
        """The mean log time of each arm on each row, (arm, row)."""
        noise, random, rows = self.noise, self.random, len(self.changes)
        logs = np.zeros((3, rows)) + (self.arms + noise.worker_sd * random.standard_normal(3))[:, None]
        logs[AFTER] += self.changes
        for process in logs:
            process += noise.process_effect(random, rows) + noise.mode_effect(random, self.bimodal)
        orders = np.array([ORDERS[(number + row) % len(ORDERS)] for row in range(rows)]).reshape(rows, 3)
        turns = np.concatenate([orders, orders[:, ::-1]], axis=1)
        drift = noise.wall(random)(noise.block_s * np.arange(turns.size)).reshape(turns.shape)
        sampling = TRIMMED_SPREAD * noise.sample_sd / math.sqrt(noise.samples)
        sd = math.hypot(noise.block_sd, noise.carry_over_sd, sampling)
        blocks = drift + sd * random.standard_normal(turns.shape) + noise.stalls(random, turns.shape)
        blocks += self.places
        for arm in (BEFORE, AFTER, CONTROL):
            logs[arm] += (blocks * (turns == arm)).sum(axis=1) / BLOCKS
        return logs


# The targets


def noises(
    process_sds: Sequence[float] = PROCESS_SDS,
    drift_sds: Sequence[float] = DRIFT_SDS,
    bimodal_shares: Sequence[float] = BIMODAL_SHARES,
) -> Iterator[Noise]:
    """The grid of noise."""
    for bimodal in bimodal_shares:
        for drift in drift_sds:
            for process in process_sds:
                yield replace(Noise(), process_sd=process, drift_sd=drift, bimodal_share=bimodal)


def false_alarms(noise: Noise, runs: int, random: Generator, rows: int = ROWS) -> list[Run]:
    """Comparisons of a revision with itself."""
    return [run(random, noise, np.zeros(rows)) for _ in range(runs)]


def injections(noise: Noise, runs: int, random: Generator, rows: int = ROWS) -> list[Run]:
    """Comparisons whose first row is 2 % slower, the others unchanged."""
    changes = np.zeros(rows)
    changes[0] = math.log1p(SLOWDOWN)
    return [run(random, noise, changes) for _ in range(runs)]


COMMON: tuple[tuple[str, Noise, Common], ...] = (
    ("nothing", H200, Common()),
    ("a process, 0.1 %", replace(H200, worker_sd=0.001), Common()),
    ("a process, 0.3 %", replace(H200, worker_sd=0.003), Common()),
    ("an arm, 0.05 %", H200, Common(arm_sd=0.0005)),
    ("an arm, 0.1 %", replace(H200, worker_sd=0.001), Common(arm_sd=0.001)),
    ("an arm, 0.3 %", replace(H200, worker_sd=0.001), Common(arm_sd=0.003)),
    ("a place, 1 %", replace(H200, worker_sd=0.001), Common(places=(0.01, 0.0, 0.0, -0.003, 0.0, 0.0))),
)
"""What rows may have in common, with its name."""
COMMON_ROWS = (4, ROWS)


def excludes(ended: Run, change: float = 0.0) -> bool:
    """Whether the interval of the mean over rows leaves out a change (a log ratio)."""
    low, high = ended.overall.interval
    return not low <= math.exp(change) <= high


def print_common(runs: int, random: Generator) -> None:
    """The interval of the mean over rows where rows have something in common: how often it errs, and what it finds."""
    print("| in common | rows | A..A runs that exclude 0 | +0.5 % on all rows: found | half width |")
    print("|---|---:|---|---:|---:|")
    for (name, noise, common), rows in itertools.product(COMMON, COMMON_ROWS):
        same = [run(random, noise, np.zeros(rows), common) for _ in range(runs)]
        slowed = [run(random, noise, np.full(rows, math.log(1.005)), common) for _ in range(runs)]
        width = np.median([ended.overall.upper(0.025) - ended.overall.mean for ended in same])
        found = sum(ended.overall.interval[0] > 1 for ended in slowed)
        print(
            f"| {name} | {rows} | {share(sum(map(excludes, same)), runs)} | {100 * found / runs:.0f} % | "
            f"{100 * width:.2f} % |",
            flush=True,
        )


def is_alarm(ended: Run) -> bool:
    """Whether a run of unchanged rows called one a regression, or an improvement."""
    return bool({ChangeVerdict.REGRESSION, ChangeVerdict.IMPROVEMENT} & set(ended.verdicts))


def is_found(ended: Run) -> bool:
    """Whether the slowed row was called a regression."""
    return ended.verdicts[0] is ChangeVerdict.REGRESSION


def share(hits: int, runs: int) -> str:
    """``7 of 2,000: 0.35 % (0.14-0.72 %)``, with the exact (Clopper-Pearson) 95 % interval."""
    low, high = binomtest(hits, runs).proportion_ci(0.95, "exact")
    return f"{hits:,} of {runs:,}: {100 * hits / runs:.2f} % ({100 * low:.2f}-{100 * high:.2f} %)"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000, help="of each target, spread over the grid of noise")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--process-sd", type=float, nargs="*", default=PROCESS_SDS, help="shares: 0.006 is 0.6 %%")
    parser.add_argument("--drift-sd", type=float, nargs="*", default=DRIFT_SDS)
    parser.add_argument("--bimodal-share", type=float, nargs="*", default=BIMODAL_SHARES)
    parser.add_argument("--common", action="store_true", help="the mean over rows, where rows have something in common")
    options = parser.parse_args(arguments)
    random = np.random.default_rng(options.seed)
    if options.common:
        print_common(options.runs, random)
        return
    grid = list(noises(options.process_sd, options.drift_sd, options.bimodal_share))
    each = -(-options.runs // len(grid))
    print(f"{ROWS} rows a run, seed {options.seed}; 95 % Clopper-Pearson intervals\n")
    print("| process sd | drift sd | bimodal rows | A..A runs with an alarm | all settled and stable | +2 % found |")
    print("|---:|---:|---:|---|---:|---|")
    same: list[Run] = []
    slowed: list[Run] = []
    for noise in grid:
        same_here, slowed_here = false_alarms(noise, each, random), injections(noise, each, random)
        settled = sum(ended.is_stable and set(ended.verdicts) == {ChangeVerdict.CLEAR} for ended in same_here)
        print(
            f"| {100 * noise.process_sd:.1f} % | {100 * noise.drift_sd:.1f} % | {100 * noise.bimodal_share:.0f} % | "
            f"{share(sum(map(is_alarm, same_here)), each)} | {100 * settled / each:.0f} % | "
            f"{share(sum(map(is_found, slowed_here)), each)} |",
            flush=True,
        )
        same, slowed = same + same_here, slowed + slowed_here
    alarms, found = sum(map(is_alarm, same)), sum(map(is_found, slowed))
    settled = sum(ended.is_stable and set(ended.verdicts) == {ChangeVerdict.CLEAR} for ended in same)
    print(f"| all | | | {share(alarms, len(same))} | {100 * settled / len(same):.0f} % | {share(found, len(slowed))} |")


if __name__ == "__main__":
    main()
