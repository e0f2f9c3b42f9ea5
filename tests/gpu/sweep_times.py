"""Time a coarse pass of one checkout and of another on the same GPU, and compare a cold compile cache with a warm one.

Run from the root of this checkout: ``python tests/gpu/sweep_times.py BASE``, where BASE is another checkout. Writes the
rows of each sweep as JSON lines to ``$OUT``. Exit code 1: it takes longer than BASE, or cold and warm disagree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ALLOWED_SHARE = 0.05
OWN = Path.cwd()


def swept(root: Path, name: str, cache: str, out: Path, arguments: list[str]) -> tuple[float, dict[str, float]]:
    """Sweep once; the wall time, and the median time of each config on each problem."""
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(root), str(root / "kernels"), *(path for path in others if path and str(OWN) != path.rstrip("/"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": cache, "FP8TUNE_BASE": ""}
    command = [sys.executable, "-m", "fp8tune", "sweep", *arguments, "--quick", "--format", "json"]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        database = ["--db", str(Path(folder) / "sweep.db")]
        done = subprocess.run([*command, *database], env=environment, cwd=folder, stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - begun
    (out / f"{name}.jsonl").write_text(done.stdout)
    times: dict[str, list[float]] = {}
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for row in rows:
        if row["time_us"] is not None:
            times.setdefault(json.dumps([row["shape"], row["routing"], row["config"]]), []).append(row["time_us"])
    statuses = {status: sum(row["status"] == status for row in rows) for status in {row["status"] for row in rows}}
    print(f"{name:12} {seconds:7.1f} s   {len(rows)} rows, {statuses}, exit code {done.returncode}", flush=True)
    return seconds, {key: statistics.median(values) for key, values in times.items()}


def differences(name: str, first: dict[str, float], second: dict[str, float]) -> int:
    """Print how the times of configs differ; how many do by more than is allowed."""
    ratios = sorted(second[key] / first[key] for key in first.keys() & second.keys())
    beyond = sum(abs(ratio - 1) > ALLOWED_SHARE for ratio in ratios)
    print(
        f"{name}: {len(ratios)} configs, {beyond} differ by more than {ALLOWED_SHARE:.0%}, "
        f"median {statistics.median(ratios):.4f}, least {ratios[0]:.3f}, most {ratios[-1]:.3f}",
        flush=True,
    )
    return beyond


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("--kernel", default="colwise")
    parser.add_argument("--shapes", default="llama4")
    parser.add_argument("--grid", default="num_stages=1")
    options = parser.parse_args()
    arguments = ["--kernel", options.kernel, "--shapes", options.shapes, "--grid", options.grid]
    root, out = options.base.resolve(), Path(os.environ.get("OUT", "."))
    with tempfile.TemporaryDirectory() as base_cache, tempfile.TemporaryDirectory() as cache:
        base_s, base = swept(root, "base, cold", base_cache, out, arguments)
        cold_s, cold = swept(OWN, "own, cold", cache, out, arguments)
        warm_base_s, _ = swept(root, "base, warm", base_cache, out, arguments)
        warm_s, warm = swept(OWN, "own, warm", cache, out, arguments)
    differences("base and own, cold", base, cold)
    beyond = differences("own, cold and warm", cold, warm)
    print(f"own takes {cold_s / base_s:.3f} of the time of base, with warm caches {warm_s / warm_base_s:.3f}")
    sys.exit(cold_s + warm_s > 1.03 * (base_s + warm_base_s) or beyond > 0.01 * len(cold))
