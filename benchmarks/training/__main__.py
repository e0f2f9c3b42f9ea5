"""Train a small mixture-of-experts language model in several precisions, with several seeds, and compare the losses.

    python -m benchmarks.training                          # 7 arms, 5 seeds, 1,000 steps: minutes on one GPU
    python -m benchmarks.training --size tiny --steps 20   # on a CPU, to see it run

The states of all runs are in --folder: what was killed goes on where it was when the command is given again, and comes
to the same bits. The model is a Qwen3-MoE of transformers; the language is made up, and the least loss is known.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.training.arms import ARMS
from benchmarks.training.language import FLOOR
from benchmarks.training.run import Settings, measured, worker
from benchmarks.training.summary import REFERENCE, lines, losses_of, speeds_table, table

SIZES = {
    "small": Settings(),
    "tiny": Settings(
        steps=40,
        sequences=4,
        length=32,
        vocabulary=64,
        topics=2,
        hidden=64,
        heads=2,
        experts=4,
        expert_width=64,
        warmup=5,
        held_out=16,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 2 for a wish that cannot be met."""
    options = _parser().parse_args(arguments)
    settings = SIZES[options.size]
    if options.steps:
        settings = replace(settings, steps=options.steps)
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not _are_settings_of(folder, settings):
        print(f"{folder} has runs of other settings: name another --folder, or remove it", file=sys.stderr)
        return 2
    runs = _trained(options, settings, folder) if options.seeds else []
    speeds = {}
    if options.device == "cuda" and not options.no_times:
        for arm in options.arms:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:  # no arm finds another's memory
                speeds[arm] = alone.submit(measured, arm, settings, options.device).result()
            print(f"{arm}: {speeds[arm]}", flush=True)
    document = {
        "settings": asdict(settings),
        "floor": FLOOR,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "cpu",
        "versions": {"torch": torch.__version__, "transformers": metadata.version("transformers")},
        "speeds": speeds,
        "runs": runs,
    }
    Path(options.json).write_text(_compact(document))
    held_out = losses_of(runs)
    if REFERENCE in held_out:
        print(table(lines(held_out), FLOOR))
        print("The same weights, all judged in bf16:")
        print(table(lines(losses_of(runs, "held_out_in_bf16")), FLOOR))
    if speeds:
        print(speeds_table(speeds))
    print(f"written: {options.json}")
    return 0


def _trained(options: argparse.Namespace, settings: Settings, folder: Path) -> list[dict[str, Any]]:
    """All runs, each in one of a few processes: the GPU works on one while another's host launches."""
    wishes = [(arm, seed) for seed in range(options.seeds) for arm in options.arms]
    results: dict[tuple[str, int], dict[str, Any]] = {}
    begin = time.monotonic()
    processes = min(options.processes, len(wishes))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {
            pool.submit(
                worker, *wish, settings, options.device, str(folder), not options.eager, options.save_every
            ): wish
            for wish in wishes
        }
        for future in as_completed(futures):
            arm, seed = futures[future]
            results[arm, seed] = future.result()
            spent = time.monotonic() - begin
            left = spent / len(results) * (len(wishes) - len(results))
            loss = results[arm, seed]["held_out"]
            print(
                f"{len(results)}/{len(wishes)} {arm} {seed}: {loss:.4f}, {spent:.0f} s, {left:.0f} s left", flush=True
            )
    return [results[wish] for wish in sorted(wishes, key=lambda wish: (ARMS.index(wish[0]), wish[1]))]


def _are_settings_of(folder: Path, settings: Settings) -> bool:
    """Return True if the folder is new, or has runs of these settings."""
    file = folder / "settings.json"
    expected = json.dumps(asdict(settings), indent=1)
    if not file.exists():
        file.write_text(expected)
    return file.read_text() == expected


def _compact(document: dict[str, Any]) -> str:
    """JSON with a run a line."""
    runs = ",\n".join(f"  {json.dumps(run)}" for run in document["runs"])
    rest = json.dumps({name: value for name, value in document.items() if name != "runs"}, indent=1)
    return f'{rest[:-2]},\n "runs": [\n{runs}\n ]\n}}\n'


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=5, help="of each arm; 0 times the arms alone")
    parser.add_argument("--steps", type=int, help="of each run; those of the size")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--folder", default="training", help="for the states and results of all runs")
    parser.add_argument("--json", default="training.json", help="where all results go")
    parser.add_argument("--processes", type=int, default=8 if torch.cuda.is_available() else 2)
    parser.add_argument("--save-every", type=int, default=200, metavar="STEPS")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="launch each kernel of a step in place of a CUDA graph")
    parser.add_argument("--no-times", action="store_true", help="do not time each arm alone afterwards")
    return parser


if __name__ == "__main__":
    sys.exit(main())
