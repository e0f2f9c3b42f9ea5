"""Study of ``recheck`` on simulated upgrades: the changed rankings that it finds, and the GPU time that it takes.

    python -m benchmarks.upgrades --upgrades 20 [--kinship 0] [--base swept.db]

A simulated GPU is swept once with a pretended Triton 1. Each upgrade changes the true times of some configs
(:class:`fp8tune.measure.simulated.Upgrade`), and ``recheck`` works on a copy of the database. By true times, a ranking
has changed if the config in use loses more than the keep band to the new best; it was known if a config within the tie
band of the best was within the tie band of the old best, on this size or on one beside it. A loss of less than 1 % over
the keep band is counted apart: a sweep seldom proves it either.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.tables import table
from fp8tune.measure.simulated import KINSHIP, SimulatedClock, Upgrade
from fp8tune.options import RecheckOptions, SweepOptions
from fp8tune.rechecking import targets
from fp8tune.rechecking.run import Recheck, Rechecked, State
from fp8tune.records import Row
from fp8tune.stats.decide import PLAN
from fp8tune.store.results import Store
from fp8tune.sweeping import planning, session
from fp8tune.sweeping.events import TrialDone

SWEEP = SweepOptions(
    kernel=("transpose-3d-atomic", "colwise-dual", "swiglu-rowwise"),
    shapes=("llama4", "deepseek-v3"),
    timer="simulated:7,triton=1",
)
FIRST_BLOCK_S, BLOCK_S, TENSORS_S = 0.06, 0.02, 0.08
"""Seconds on an H100: a config's check and first block, another block, and the tensors of a size in a process."""

CLEAR = PLAN.keep_band + 0.01


def seconds(rows: Iterable[Row]) -> float:
    """Return the GPU time that trials would take on an H100."""
    total, processes = 0.0, set[object]()
    for row in rows:
        process = row.problem, row.stage == "screen" or row.process
        total += FIRST_BLOCK_S if row.stage == "screen" and row.round == 0 else BLOCK_S
        total += 0.0 if process in processes else TENSORS_S
        processes.add(process)
    return total


def judge(item: Rechecked, before: SimulatedClock, after: SimulatedClock, rivals: set[object]) -> tuple[str, str]:
    """Return a size's change (none, known or new winner), and the result of its recheck."""
    size, current = item.target.size, item.target.current
    true_us = {config: after.true_time_us(size.arm(config).work) for config in size.configs}
    best_us = min(true_us.values())
    winners = {config for config, time_us in true_us.items() if time_us <= best_us * (1 + PLAN.tie_band)}
    loss = true_us[current] / best_us - 1
    change = "none"
    if loss > PLAN.keep_band:
        change = f"{'known' if winners & rivals else 'new'}{', near the keep band' if loss <= CLEAR else ''}"
    if item.state is not State.BEATEN:
        return change, "to sweep" if item.needs_sweep else "kept"
    return change, "found" if true_us[item.best] < true_us[current] / (1 + PLAN.tie_band) else "wrong"


def tied(work: Recheck, clock: SimulatedClock) -> list[set[object]]:
    """Return the true rivals of each size before the upgrade: those of the size, and of those beside it."""
    sets = []
    for target in work.targets:
        times_us = {config: clock.true_time_us(target.size.arm(config).work) for config in target.size.configs}
        limit_us = min(times_us.values()) * (1 + PLAN.tie_band)
        sets.append({config for config, time_us in times_us.items() if time_us <= limit_us})
    kernels = [target.size.version.kernel for target in work.targets]
    beside = [
        [sets[near] for near in (place - 1, place + 1) if 0 <= near < len(sets) and kernels[near] == kernel]
        for place, kernel in enumerate(kernels)
    ]
    return [set().union(own, *others) for own, others in zip(sets, beside, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of the study."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--upgrades", type=int, default=20)
    parser.add_argument("--kinship", type=float, default=KINSHIP, help="correlation of a config's change on two sizes")
    parser.add_argument("--base", type=Path, help="file that keeps the swept database")
    options = parser.parse_args(arguments)
    os.environ |= {"TRITON_INTERPRET": "1", "FP8TUNE_BASE": "", "FP8TUNE_TABLES": ""}
    counts, spent_s = Counter[tuple[str, str, str]](), dict.fromkeys(("sweep", "stage 2", "stage 3"), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        base = options.base or Path(folder) / "base.db"
        with Store.open(str(base), create=True) as store:
            for _ in session.run(store, planning.expanded(planning.planned(SWEEP))):
                pass
            spent_s["sweep"] = seconds(store.rows()) * options.upgrades
        for number in range(2, options.upgrades + 2):
            path = shutil.copy(base, Path(folder) / f"{number}.db")
            os.environ["FP8TUNE_TIMER"] = f"simulated:7.{number},triton={number}"
            before = SimulatedClock(7)
            after = SimulatedClock(7, noise_seed=number, upgrade=Upgrade(number, kinship=options.kinship))
            with Store.open(str(path), create=True) as store:
                plan, chosen = targets.planned(RecheckOptions(budget_s=1e6), store)
                plan.backend.clock = after  # type: ignore[union-attr]
                work = Recheck(store, plan, chosen)
                rivals = tied(work, before)
                for name, events in (("stage 2", work.time_known()), ("stage 3", work.sweep_lost())):
                    new = (event.row for event in events if isinstance(event, TrialDone) and not event.from_database)
                    spent_s[name] += seconds(new)
                    judged = (judge(item, before, after, own) for item, own in zip(work.results, rivals, strict=True))
                    counts.update((name, *result) for result in judged)
            print(f"upgrade {number - 1} of {options.upgrades}", dict(counts), spent_s, file=sys.stderr, flush=True)
    rows = []
    for change in ("none", "known", "known, near the keep band", "new", "new, near the keep band"):
        total = sum(count for key, count in counts.items() if key[:2] == ("stage 2", change))
        shares = [
            f"{counts[stage, change, result]} ({counts[stage, change, result] / max(1, total):.1%})"
            for stage, result in (("stage 2", "found"), ("stage 3", "found"), ("stage 3", "wrong"))
        ]
        rows.append([change, str(total), *shares])
    print(table(["new winner", "sizes", "found by stage 2", "and by stage 3", "changed wrongly"], rows))
    known, swept = (spent_s[stage] / spent_s["sweep"] for stage in ("stage 2", "stage 3"))
    print(f"\nGPU time: {known + swept:.1%} of the sweep's, {swept:.1%} of it in stage 3")


if __name__ == "__main__":
    main()
