"""Programs that are compiled without a GPU: which, in what order, and that another host finds them."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import command_line
import pytest
from fleet import ray_cluster
from forked import alone

from fp8tune.fleet import ahead, units
from fp8tune.fleet.ahead import CompileTask
from fp8tune.fleet.on_ray import RayFleet
from fp8tune.store.results import Store
from fp8tune.store.units import QueuedSweep, Unit
from fp8tune.sweep import planning
from fp8tune.sweep.options import Options
from fp8tune.sweep.planning import Plan

ARCH = "sm_90"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of("BLOCK_SIZE_M=4", "BLOCK_SIZE_K=256", "num_warps=4")


def plan_of(*grid: str) -> Plan:
    options = Options(kernels=("mxfp8-dim0",), shapes=("tiny",), grid=grid, timer=ray_cluster.TIMER, quick=True)
    return planning.expanded(planning.planned(options))


@pytest.fixture
def task(plan: Plan, tmp_path: Path) -> CompileTask:
    with Store.open(str(tmp_path / "queue.db"), create=True) as store:
        added = units.add(store, plan)
        return replace(ahead.task_of(store, plan, added.sweep, 1), arch=ARCH, triton=here())


def here() -> str:
    import triton

    return str(triton.__version__)


def unit(number: int, kernel: str) -> Unit:
    return Unit(f"unit-{number}", "sweep", number, kernel, "aaaa", (f"problem-{number}",), ("M=1",))


def test_kernels_that_gpus_begin_with_come_last() -> None:
    waiting = [unit(n, kernel) for n, kernel in enumerate(["a", "a", "b", "a", "c", "b"])]
    orders = [[name for name, _ in ahead.kernels_of(waiting, gpus)] for gpus in (0, 2, 3, 8)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


FINDING = """
import pickle, sys
from dataclasses import replace
from triton import knobs
from fp8tune.errors import MachineError
from fp8tune.fleet import ahead
from fp8tune.measure import cached_programs
from fp8tune.measure.compiling import compile_config, compile_edges
task = pickle.load(sys.stdin.buffer)
arms = [ahead.arms_of(of) for of in (task, *(replace(task, place=place, places=3) for place in range(3)))]
errors = []
for wrong in (replace(task, triton="1.0"), replace(task, kernels=(("mxfp8-dim0", "0000"),))):
    try:
        ahead.arms_of(wrong)
    except MachineError as error:
        errors.append(str(error))
found, hits = list(cached_programs.new(set())), []
knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
for arm in arms[0]:
    compile_edges(arm.reference, arm.problem, arm.config, task.arch)
    compile_config(arm.reference, arm.problem, arm.config, task.arch, 1 << 20)
pickle.dump((arms, errors, hits, len(found), cached_programs.keep(found)), sys.stdout.buffer)
"""


def answer(program: str, given: object, cache: Path) -> Any:
    """What a fresh process says that finds programs in ``cache``."""
    environment = {**command_line.environment(), "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, input=pickle.dumps(given), env=environment, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    return pickle.loads(ended.stdout)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for the names of Ray's sockets."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
@alone
def test_a_node_without_a_gpu_compiles_for_the_others(
    plan: Plan, task: CompileTask, monkeypatch: pytest.MonkeyPatch, short: Path
) -> None:
    cache = short / "cache"
    monkeypatch.setenv("TMPDIR", str(short))
    with ray_cluster.cluster(1, TRITON_CACHE_DIR=str(cache)) as cluster, queue(plan, short) as (fleet_of, sweep):
        cluster.add_node(**{**cluster.small, "num_cpus": 2}, num_gpus=0)
        mine = replace(task, sweep=sweep)
        long = replace(mine, sweep=units.queued(plan_of()))  # some minutes, of which it is told to stop in the first
        said = until(lambda _: any(short.glob("fp8tune-ahead-*/*")), fleet_of, long)
        assert said == []
        assert not [*short.glob("fp8tune-ahead-*")]  # it was told to stop, and what it had is gone
        (line,) = until(lambda lines: bool(lines) and f" {kept(cache)} programs" in lines[0], fleet_of, mine)
    (whole, *shares), errors, hits, programs, anew = answer(FINDING, mine, cache)
    assert f"has compiled {programs} programs ahead for {ARCH}" in line
    assert len(hits) >= programs >= 2
    assert all(hits)
    assert anew == 0
    assert len(whole) >= 2
    assert sorted(map(repr, whole)) == sorted(repr(arm) for share in shares for arm in share)
    assert errors == [
        f"Triton here is {here()}, and 1.0 where the sweep was queued",
        "the kernels have other code here than where the sweep was queued",
    ]


def kept(cache: Path) -> int:
    """Whole programs in a cache."""
    return len([*cache.glob("*/__grp__*")])


@contextlib.contextmanager
def queue(plan: Plan, folder: Path) -> Iterator[tuple[Callable[[Callable[[str], None]], RayFleet], QueuedSweep]]:
    """A fleet for each call, with who is told its lines; and the sweep that it does."""
    db = str(folder / "rows.db")
    with Store.open(db, create=True) as store:
        added = units.add(store, plan)
        yield (
            lambda say: RayFleet(
                db, store, plan.options.timer, ray_cluster.WORKER_S, "", lambda: 0.0, say, kernels=plan.options.kernels
            ),
            added.sweep,
        )


def until(
    is_over: Callable[[list[str]], bool], fleet_of: Callable[[Callable[[str], None]], RayFleet], task: CompileTask
) -> list[str]:
    """What a fleet says that compiles ahead, until something holds for it."""
    lines: list[str] = []
    with fleet_of(lines.append) as fleet:
        fleet.compile_ahead(task)
        deadline = time.monotonic() + 120
        while not is_over(lines) and time.monotonic() < deadline:
            assert not fleet.is_over()
            at_it = [state.doing for state in fleet.states.values()]
            assert at_it.count("compiling ahead") == (not lines)
            time.sleep(0.1)
    return lines
