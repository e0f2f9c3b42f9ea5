"""A Ray cluster with made-up GPUs, and a sweep of many small units on it, while workers, nodes and databases die."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from places import PLANTED

from fp8tune.fleet import run, units
from fp8tune.fleet.on_ray import RayFleet
from fp8tune.fleet.run import FleetProgress
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState
from fp8tune.sweep import picks, planning
from fp8tune.sweep.options import Options
from fp8tune.sweep.planning import Plan

KERNEL = f"{PLANTED / 'untouched.py'}:SPEC"
GRID = ("BLOCK_SIZE=64",)
"""Two configs."""
TIMER = "simulated:1"

WORKER_S = 215.0
"""The time budget of a worker. Below 220 s it checks no config before its first unit, for which it would import torch:
2 s of a core each."""

RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
}
"""No report to Ray's makers, no token in the home folder of whoever runs the tests, no worker that idles, and none that
waits for other tests."""


def shapes(folder: Path, problems: int) -> Path:
    """A shape set of so many problems of the kernel."""
    path = folder / "many.toml"
    rows = (f"[[rows]]\nM = {256 * (1 + n % 4)}\nK = {512 + 64 * n}\n" for n in range(problems))
    path.write_text("\n".join(rows))
    return path


def plan(folder: Path, problems: int, timer: str = TIMER) -> Plan:
    """A sweep whose problems are a unit each: two configs, screened."""
    options = Options(
        kernels=(KERNEL,), shapes=(str(shapes(folder, problems)),), grid=GRID, timer=timer, quick=True, seed=3
    )
    return planning.expanded(planning.planned(options))


@contextlib.contextmanager
def cluster(*gpus: int, **environment: str) -> Iterator[Any]:
    """Nodes with so many made-up GPUs each, the first of which is the head; ``RAY_ADDRESS`` names it.

    ``environment``: more variables of all its processes.
    """
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ.update(RAY | environment)
    # a worker that is to interpret kernels imports torch for it: 3 s of a core each
    os.environ.pop("TRITON_INTERPRET", None)
    small = {"object_store_memory": 80 << 20, "include_dashboard": False, "num_cpus": 1, "include_log_monitor": False}
    made = Cluster(initialize_head=True, head_node_args={**small, "num_gpus": gpus[0], "no_monitor": True})
    try:
        made.gpu_nodes = [made.head_node, *(made.add_node(**small, num_gpus=count) for count in gpus[1:])]
        made.small = small
        os.environ["RAY_ADDRESS"] = made.address
        yield made
    finally:
        made.shutdown()
        os.environ.clear()
        os.environ.update(before)


Act = Callable[[RayFleet], object]


def on_ray(db: str, of: Plan, acts: Sequence[tuple[float, Act]] = ()) -> FleetProgress:
    """Run a plan on the cluster at ``RAY_ADDRESS``. ``acts``: what is done once a share of the units is done."""
    waiting = sorted(acts, key=lambda act: act[0])
    progress = None
    with Store.open(db, create=True) as store:
        with one_problem_a_unit():
            added = units.add(store, of)
        with RayFleet(db, store, of.options.timer, WORKER_S, clock=lambda: 0.0, kernels=of.options.kernels) as fleet:
            for progress in run.watch(store, [added.sweep.key], is_over=fleet.is_over):
                share = progress.counts[UnitState.DONE] / len(progress.queue.units)
                while waiting and share >= waiting[0][0]:
                    waiting.pop(0)[1](fleet)
        picks.keep_current(store)
    assert progress is not None
    assert not waiting, "the sweep was over before all had happened"
    return progress


@contextlib.contextmanager
def one_problem_a_unit() -> Iterator[None]:
    longest, shortest = units.UNIT_S, units.SHORTEST_S
    units.UNIT_S, units.SHORTEST_S = 1e-6, 0.0
    try:
        yield
    finally:
        units.UNIT_S, units.SHORTEST_S = longest, shortest


def kill_a_worker(seed: int) -> Act:
    """``kill -9`` of one that has a unit, if one has."""

    def act(fleet: RayFleet) -> None:
        import ray

        at_it = [slot for slot in fleet.working if slot.state.unit] or fleet.working
        for slot in random.Random(seed).sample(at_it, len(at_it)):
            with contextlib.suppress(ray.exceptions.RayError):  # one that died with its node just now
                pid, _, _ = ray.get(slot.actor.where.remote())
                os.kill(pid, signal.SIGKILL)
                return
        raise AssertionError("no worker was left to be killed")

    return act


def kill_node(of: Any, number: int) -> Act:
    """``kill -9`` of all processes of a node."""
    return lambda _: of.remove_node(of.gpu_nodes[number], allow_graceful=False)


def add_node(of: Any, gpus: int) -> Act:
    """A node that joins."""
    return lambda _: of.gpu_nodes.append(of.add_node(**of.small, num_gpus=gpus))
