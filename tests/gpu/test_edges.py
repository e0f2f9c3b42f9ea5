"""On a GPU: the check before the clock passes every kernel on its edges, and finds every fault that they are for.

Each trial runs in one of a pool of workers, which compile side by side; one that hangs or breaks its GPU context ends.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from places import ROOT

from fp8tune.measure.arms import KernelArm
from fp8tune.measure.device import limits, probe
from fp8tune.measure.trial import checked_block
from fp8tune.measure.worker import WorkerPool, usable_cores
from fp8tune.plan import grids
from fp8tune.records import NamedInts, Outcome, Problem, Status
from fp8tune_kernels import catalog

sys.path.append(str(ROOT / "tests" / "kernels"))

from cases import QUANTIZING, leads
from edge_mutants import FAULTS_OF_EDGES
from planting import Planted, plant_foreign

pytestmark = pytest.mark.gpu

TRIAL_TIMEOUT_S = 120.0

SAMPLED_CONFIGS = 3
"""Of each kernel's grid, beside the default."""

ROUND = {
    "colwise": NamedInts(M=1024, K=512, G=2),
    "colwise-3d": NamedInts(E=2, N=16, K=8192),
    "colwise-dual": NamedInts(M=1024, N=512, K=256, G=2),
    "colwise-transpose-3d": NamedInts(E=2, N=512, K=512),
    "mxfp8-dim0": NamedInts(M=64, K=4096),
    "mxfp8-dim1": NamedInts(M=1024, K=1024),
    "mxfp8-dim1-3d": NamedInts(E=2, N=1024, K=1024),
    "mxfp8-dim1-3d-via-2d": NamedInts(E=2, N=1024, K=1024),
    "rowwise": NamedInts(N=256, M=2048, G=2),
    "rowwise-2d": NamedInts(M=64, K=8192),
    "rowwise-colwise": NamedInts(M=1024, K=512, G=2),
    "transpose-3d-atomic": NamedInts(E=2, N=512, K=512),
    "transpose-3d-reduction": NamedInts(E=2, N=4096, K=256),
}
"""Problems as a sweep times them, but small: nothing is left over of any block."""

OTHER_BLOCKS = {
    "colwise": {"BLOCK_SIZE": 128, "BLOCK_SIZE_ITER": 64},
    "colwise-3d": {"BLOCK_SIZE_N": 4, "BLOCK_SIZE_K": 1024},
    "colwise-dual": {"BLOCK_SIZE": 32, "BLOCK_SIZE_ITER": 128},
    "colwise-transpose-3d": {"BLOCK_SIZE": 128, "BLOCK_SIZE_ITER": 64},
    "mxfp8-dim0": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_K": 256},
    "mxfp8-dim1": {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_K": 64},
    "mxfp8-dim1-3d": {"BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64},
    "mxfp8-dim1-3d-via-2d": {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_K": 64},
    "rowwise": {"BLOCK_SIZE": 64, "BLOCK_SIZE_ITER": 128},
    "rowwise-2d": {"BLOCK_SIZE": 4, "BLOCK_SIZE_ITER": 1024},
    "rowwise-colwise": {"BLOCK_SIZE": 128, "BLOCK_SIZE_ITER": 64},
    "transpose-3d-atomic": {"BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128},
    "transpose-3d-reduction": {"BLOCK_SIZE_N": 512, "BLOCK_SIZE_K": 32},
}
"""Of the config that is tried beside the default: of a block of one row no part can be left over."""


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(min(16, usable_cores()))
    yield pool
    pool.close()


def round_problem(kernel: str, name: str, layout: str) -> Problem:
    spec = catalog.load(kernel)
    return Problem(name, ROUND[kernel], "balanced" if spec.routed else "none", layout, scale_mode=spec.scale_modes[0])


def layout_of(title: str, planted: Planted) -> str:
    """The one that the faulty code is for."""
    return catalog.load(planted.kernel).input_layouts[-1 if ", panels" in title.partition(":")[0] else 0]


def answer(future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except Exception as error:  # a worker that hung or died has found something, too, but not by its bytes
        return Outcome(Status.CRASHED, reason=f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")


def test_every_kernel_is_right_on_its_edges(pool: WorkerPool) -> None:
    device = probe()
    assert device is not None
    asked: dict[tuple[str, str, NamedInts], Future[Outcome]] = {}
    for kernel in QUANTIZING:
        spec = catalog.load(kernel)
        for layout in spec.input_layouts:
            problem = round_problem(kernel, kernel, layout)
            grid = grids.configs(spec, problem, spec.axes, limits(device))
            trials = [config for config, pruned in grid.items() if not pruned]
            others = random.Random(kernel + layout).sample(trials[1:], SAMPLED_CONFIGS)
            for config in (spec.default, *others):
                asked[kernel, layout, config] = pool.submit(
                    TRIAL_TIMEOUT_S, checked_block, KernelArm(kernel, problem, config), "cuda", 0, times=False
                )
    answers = {what: answer(future) for what, future in asked.items()}
    wrong = [(*what, outcome) for what, outcome in answers.items() if outcome.status is not Status.OK]
    print(f"\nright {len(answers) - len(wrong)} of {len(answers)}", *wrong, sep="\n  ")
    assert not wrong


def test_every_fault_of_an_edge_is_found(pool: WorkerPool, tmp_path: Path) -> None:
    asked: dict[str, list[Future[Outcome]]] = {}
    for number, (title, fault) in enumerate(FAULTS_OF_EDGES.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        planted = plant_foreign(title, fault, folder)
        spec = catalog.load(planted.kernel)
        default = spec.default
        problem = round_problem(planted.kernel, planted.name, layout_of(title, planted))
        configs = (default, NamedInts({**default, **OTHER_BLOCKS[planted.kernel], **leads(spec)[0]}))
        arms = [KernelArm(planted.reference, problem, config) for config in configs]
        asked[title] = [pool.submit(TRIAL_TIMEOUT_S, checked_block, arm, "cuda", 0, times=False) for arm in arms]
    answers = {title: [answer(future) for future in futures] for title, futures in asked.items()}
    missed = [title for title, found in answers.items() if not any(each.status is Status.WRONG for each in found)]
    seen = [title for title, found in answers.items() if not any(" on the edge '" in each.reason for each in found)]
    once = [title for title, found in answers.items() if any(each.status is Status.OK for each in found)]
    print(f"\nfound {len(answers) - len(missed)} of {len(answers)}")
    tell("missed", missed, answers)
    tell("found, but not on an edge", [title for title in seen if title not in missed], answers)
    tell("right in one of the two configs", [title for title in once if title not in missed], {})
    assert not missed


def tell(what: str, titles: list[str], answers: dict[str, list[Outcome]]) -> None:
    print(f"{what}: {len(titles)}")
    for title in titles:
        print(f"  {title}", *(f"{each.status}: {each.reason}" for each in answers.get(title, ())), sep="\n    ")
