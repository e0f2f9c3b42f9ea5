"""Why FP8 ends above bf16 in docs/examples/moe_training.py: worse weights, or rounded outputs?

    python -m benchmarks.example_loss                  # three precisions, five seeds, 1,000 steps: a minute on a GPU
    python -m benchmarks.example_loss --steps 5 --tokens 64 --dim 32 --hidden 48 --experts 4 --seeds 2
    python -m benchmarks.example_loss --show docs/results/example-loss.json    # the table of such a file

Layers are trained in each precision. Then each is judged on the same new data in each precision: the weights of FP8 in
bf16 say what training has lost, and those of bf16 in FP8 what rounding the outputs alone adds to the squared error.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "moe_training.py"

JUDGED = 100
"""Batches of new data."""

REFERENCE = "bf16"

Losses = dict[str, dict[str, float]]
"""[trained in][judged in], and [trained in]["last 200"]: the mean loss of the last steps of training."""


def example() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("moe_training", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses_of(options: argparse.Namespace, seed: int) -> Losses:
    """Of one seed."""
    moe = example()
    options = argparse.Namespace(**{**vars(options), "seed": seed})
    found: Losses = {}
    for name, way in moe.WAYS.items():
        model, teacher = moe.start(way, options)
        found[name] = {"last 200": fmean(moe.train(model, teacher, options)[-200:])}
        for judge, multiply in moe.WAYS.items():
            model.grouped_mm = multiply
            found[name][judge] = judged(model, teacher, options)
    return found


@torch.no_grad()
def judged(model: torch.nn.Module, teacher: torch.nn.Module, options: argparse.Namespace) -> float:
    """The mean loss on data that no training has seen, and that all layers of a seed are judged on."""
    generator = torch.Generator(options.device).manual_seed(1_000_003)
    losses = []
    for _ in range(JUDGED):
        x = torch.randn(options.tokens, options.dim, device=options.device, generator=generator)
        losses.append(torch.nn.functional.mse_loss(model(x), teacher(x)))
    return fmean(torch.stack(losses).tolist())


def table(found: Sequence[Losses]) -> str:
    """Markdown: the mean of the seeds, and its difference from bf16 trained and judged in bf16, seed by seed, in %."""
    names = list(found[0])
    rows = [
        f"| trained in | last 200 steps | {' | '.join(f'judged in {name}' for name in names)} |",
        f"|---|{'---:|' * (len(names) + 1)}",
    ]
    for name in names:
        cells = []
        for column in ("last 200", *names):
            reference = "last 200" if column == "last 200" else REFERENCE
            values = [losses[name][column] for losses in found]
            wanted = [losses[REFERENCE][reference] for losses in found]
            less = [100 * (value / right - 1) for value, right in zip(values, wanted, strict=True)]
            cells.append(f"{fmean(values):.6f} ({fmean(less):+.2f} ± {spread(less):.2f} %)")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    own = [losses[REFERENCE][REFERENCE] for losses in found]
    rows += ["", f"Standard deviation of the seeds of bf16, judged in bf16: {100 * spread(own) / fmean(own):.2f} %."]
    return "\n".join(rows)


def spread(values: Sequence[float]) -> float:
    """The standard deviation; 0 of one value."""
    return stdev(values) if len(values) > 1 else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and judge, a process a seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 1000), ("tokens", 4096), ("dim", 256), ("hidden", 512), ("experts", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="write all losses here too")
    parser.add_argument("--show", metavar="FILE", help="print the table of a file that --json wrote, and train nothing")
    options = parser.parse_args(arguments)
    if options.show:
        print(table(json.loads(Path(options.show).read_text(encoding="utf-8"))))
        return 0
    processes = options.seeds if options.device == "cuda" else 1
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(losses_of, [options] * options.seeds, range(options.seeds)))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
