"""Train a small mixture-of-experts language model in several precisions, with several seeds, and compare the losses.

    python -m benchmarks.training                          # 7 arms, 5 seeds, 1,000 steps: minutes on one GPU
    python -m benchmarks.training --size tiny --steps 20   # on a CPU, to see it run

Results of runs are in --folder: the same command begins those anew that were stopped. The model is a Qwen3-MoE of
transformers; the language is made up, and the least possible loss is known.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.tables import table
from benchmarks.training.arms import ARMS
from benchmarks.training.language import FLOOR
from benchmarks.training.run import Settings, worker

REFERENCE = "bf16"  # arm that others are compared with
TINY = {"sequences": 4, "length": 32, "vocabulary": 64, "topics": 2, "hidden": 64, "heads": 2, "experts": 4}
SIZES = {
    "small": Settings(),
    "tiny": replace(Settings(**TINY), steps=40, expert_width=64, warmup=5, held_out=16),
}
HEADINGS = ("arm", "seeds", "loss", "over the floor", "standard deviation", "less bf16, seed by seed", "within it")


def losses_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the final losses in nats per token, and whether their mean is within a standard deviation of bf16's."""
    losses = pd.DataFrame(runs).pivot(index="arm", columns="seed", values="held_out")
    less, spreads = losses - losses.loc[REFERENCE], losses.std(axis=1).fillna(0.0)
    rows = []
    for arm in (arm for arm in ARMS if arm in losses.index):
        seeds, mean, difference = losses.loc[arm].count(), losses.loc[arm].mean(), less.loc[arm].mean()
        row = [arm, str(seeds), f"{mean:.4f}", f"{mean - FLOOR:.4f}", f"{spreads[arm]:.4f}", "", ""]
        if arm != REFERENCE:
            row[5] = f"{difference:+.4f} ± {less.loc[arm].std():.4f}"
            row[6] = "yes" if abs(difference) <= spreads[REFERENCE] else "no"
        rows.append(row)
    return table(HEADINGS, rows)


def trained(options: argparse.Namespace, settings: Settings) -> list[dict[str, Any]]:
    """Train all arms in a few processes: the GPU works on one while another's host launches."""
    runs, results = [(arm, seed) for seed in range(options.seeds) for arm in options.arms], dict[Any, Any]()
    begun = time.monotonic()
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(worker, *run, settings, options.device, str(options.folder)): run for run in runs}
        for future in as_completed(futures):
            arm, seed = run = futures[future]
            results[run] = future.result()
            place, loss = f"{len(results)}/{len(runs)}", results[run]["held_out"]
            print(f"{place} {arm} {seed}: {loss:.4f}, {time.monotonic() - begun:.0f} s", flush=True)
    return [results[run] for run in sorted(runs, key=lambda run: (ARMS.index(run[0]), run[1]))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and print the table; return 2 for a folder with runs of other settings."""
    is_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=5, help="of each arm")
    parser.add_argument("--steps", type=int, help="of each run; those of the size")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--folder", type=Path, default=Path("training"), help="results of all runs")
    parser.add_argument("--json", type=Path, default=Path("training.json"), help="where all results go")
    parser.add_argument("--processes", type=int, default=8 if is_cuda else 2)
    parser.add_argument("--device", default="cuda" if is_cuda else "cpu")
    options = parser.parse_args(arguments)
    settings = replace(SIZES[options.size], steps=options.steps or SIZES[options.size].steps)
    options.folder.mkdir(parents=True, exist_ok=True)
    file, text = options.folder / "settings.json", json.dumps(asdict(settings), indent=1)
    if file.exists() and file.read_text() != text:
        print(f"{options.folder} has runs of other settings: name another --folder, or remove it", file=sys.stderr)
        return 2
    file.write_text(text)
    runs = trained(options, settings)
    document = {
        "settings": asdict(settings),
        "floor": FLOOR,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "cpu",
        "versions": {"torch": torch.__version__, "transformers": metadata.version("transformers")},
    }
    lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
    options.json.write_text(f'{json.dumps(document, indent=1)[:-2]},\n "runs": [\n{lines}\n ]\n}}\n')
    if REFERENCE in (run["arm"] for run in runs):
        print(losses_table(runs))
    print(f"written: {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
