"""``python -m benchmarks.fleet_on_ray``: 500 units on 8 simulated GPUs of a Ray cluster, whose workers and nodes die.

Every twentieth of the units a worker is killed, and a node in the middle, which another replaces. At the end every unit
was done once, and the exported table is compared byte by byte with that of one process. ``--db URL`` for a server.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import sys
import tempfile
import time
from pathlib import Path

from fp8tune.cli import main as fp8tune
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState
from fp8tune.sweep import session


def exported(db: str, kernel: str, path: Path) -> bytes:
    """The table of a kernel in a database."""
    sys.argv = ["fp8tune", "export", "--arch", "simulated", "--kernel", kernel, "--db", db, "--output", str(path)]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            fp8tune()
    except SystemExit as ended:
        if ended.code:
            raise
    return path.read_bytes()


def main() -> None:
    """Print what was done and how long it took."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    ray_cluster = importlib.import_module("fleet.ray_cluster")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=500, help="each is a unit")
    parser.add_argument("--db", default="", help="a server's URL; a file without it")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = ray_cluster.plan(folder, given.problems)
        with ray_cluster.cluster(4, 4) as cluster:
            kills = [(share / 20, ray_cluster.kill_a_worker(share)) for share in range(1, 20)]
            acts = [*kills, (0.51, ray_cluster.kill_node(cluster, 1)), (0.53, ray_cluster.add_node(cluster, 4))]
            db, begun = given.db or str(folder / "eight.db"), time.monotonic()
            progress = ray_cluster.on_ray(db, plan, acts)
        seconds, begun = time.monotonic() - begun, time.monotonic()
        alone = str(folder / "one.db")
        with Store.open(alone, create=True) as store:
            for _ in session.run(store, plan):
                pass
        by_one = time.monotonic() - begun
        kernel = ray_cluster.KERNEL
        same = exported(db, kernel, folder / "eight.py") == exported(alone, kernel, folder / "one.py")
    done = progress.counts[UnitState.DONE]
    print(f"{done} of {len(plan.problems)} units done in {seconds:.0f} s, {len(kills)} workers and a node killed")
    print(f"one process: {by_one:.0f} s; the table is {'the same' if same else 'ANOTHER'}")
    raise SystemExit(0 if same and done == len(plan.problems) else 1)


if __name__ == "__main__":
    main()
