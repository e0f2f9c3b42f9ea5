"""Times in CUDA graphs: on the simulated clock, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from places import PLANTED

from fp8tune.comparing import recorded
from fp8tune.comparing.sides import Kernel, Sides
from fp8tune.comparing.verdicts import Revision
from fp8tune.measure import trial
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.backends import GpuBackend
from fp8tune.measure.checking import build_unchecked
from fp8tune.measure.simulated import SimulatedClock
from fp8tune.measure.timing import block
from fp8tune.options import SweepOptions
from fp8tune.records import GRAPH, Device, NamedInts, Problem
from fp8tune.stats.means import trimmed_mean
from fp8tune.stats.study import Study, Verdict
from fp8tune.store.results import Store
from fp8tune.sweeping import planning, session
from fp8tune_kernels.spec import Edge, KernelSpec

FAULTS = f"{PLANTED / 'faults.py'}:SPEC"
HOST_US = 40.0
TIMER = f"simulated:7,host={HOST_US:g}"


@pytest.fixture(autouse=True)
def no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> SweepOptions:
    """Sizes of decoding, whose launches are shorter than the host's time for them."""
    path = tmp_path_factory.mktemp("shapes") / "few.toml"
    path.write_text("[[rows]]\nM = [1, 16, 256]\nK = 512\nN = 8\nE = 2\n")
    return SweepOptions(kernel=(FAULTS,), shapes=(str(path),), grid=("num_warps=4,8",), timer=TIMER)


@pytest.fixture(scope="module")
def both(options: SweepOptions) -> Iterator[tuple[Store, list[Study], list[Study]]]:
    """A database, the picks by events and those in graphs."""
    with pytest.MonkeyPatch.context() as patch, Store.open("sqlite://", create=True) as store:
        patch.setenv("TRITON_INTERPRET", "1")
        by_events = swept(store, options)
        yield store, by_events, swept(store, replace(options, timing="graph"))


def swept(store: Store, options: SweepOptions) -> list[Study]:
    plan = planning.expanded(planning.planned(options))
    list(session.run(store, plan))
    return session.studies(store, plan)


def slowdown(study: Study) -> float:
    """True time of a pick over that of the best config."""
    clock, spec = SimulatedClock(7), study.results
    arms = {r.config: arm_of(study, r.config) for r in spec if r.config is not None}
    times = {config: clock.true_time_us(arm.work) for config, arm in arms.items()}
    return times[study.choice.pick] / min(times.values())


def arm_of(study: Study, config: NamedInts) -> KernelArm:
    return KernelArm(FAULTS, study.problem, config, study.lookup_key or NamedInts(), study.bytes_moved or 0)


def test_events_hide_configs_below_the_hosts_time_and_graphs_tell_them_apart(
    both: tuple[Store, list[Study], list[Study]],
) -> None:
    _, by_events, in_graphs = both
    assert all(study.choice.time_us == pytest.approx(HOST_US, rel=0.01) for study in by_events)
    assert max(map(slowdown, by_events)) > 1.05
    assert all(study.choice.time_us < HOST_US for study in in_graphs)
    assert all(slowdown(study) < 1.025 for study in in_graphs)
    assert {study.choice.verdict for study in in_graphs} == {Verdict.PROVEN}


def test_the_two_kinds_are_never_mixed(both: tuple[Store, list[Study], list[Study]], options: SweepOptions) -> None:
    """Not in a study, where the second sweep timed everything anew; not in a comparison of recorded results."""
    store, by_events, in_graphs = both
    tried = [{(row.problem, row.config) for row in store.rows() if row.device.timing == kind} for kind in ("", GRAPH)]
    assert tried[0] == tried[1]
    assert [study.device.timing for study in (*by_events, *in_graphs)] == [""] * 3 + [GRAPH] * 3
    rows = len(list(store.rows()))
    swept(store, replace(options, timing="graph"))
    assert len(list(store.rows())) == rows
    studies = store.studies()
    hashes = {"": "a", GRAPH: "b"}  # as of two revisions, of which each was timed in one way
    versions = [
        replace(study, version=replace(study.version, source_hash=hashes[study.device.timing]))
        for study in studies
        if study.version
    ]
    kernel = Kernel(studies[0].problem.kernel, ("", ""), ("a", "b"))
    sides = Sides(Revision("A", "1"), Revision("B", "2"), (Path(), Path()), (kernel,))
    compared = recorded.compare(versions, sides).rows
    assert len(compared) == len(studies)
    assert all(row.effect is None for row in compared)
    assert all("never compared with these: timing" in row.reason for row in compared)


def test_a_kernel_that_cannot_be_captured_is_timed_by_events(options: SweepOptions) -> None:
    """Here there is no GPU, so that nothing can; the line names the kernel."""
    short = planning.planned(replace(options, timing="graph"))
    short = replace(short, backend=GpuBackend(Device("sm_90", timing="gated"), None, torch_device="cpu"))
    plan = planning.expanded(short)
    short.backend.close()
    (line,) = [notice for notice in plan.notices if "CUDA graph" in notice]
    assert line.startswith(plan.problems[0].problem.kernel)
    assert "\n" not in line
    assert {size.in_graph for size in plan.problems} == {0}
    assert {plan.subject(size).device.timing for size in plan.problems} == {"gated"}


# On a GPU


def spec_of(launch: object) -> KernelSpec:
    return KernelSpec(
        name="doubled",
        axes={"num_warps": (4,)},
        default=NamedInts(num_warps=4),
        key=("K",),
        problems=lambda row: iter(()),
        inputs=lambda problem, device: (torch.ones(problem.shape["K"], device=device),),
        outputs=lambda x: (torch.empty_like(x),),
        launch=launch,  # type: ignore[arg-type]
        reference=lambda x: (2 * x,),
    )


PROBLEM = Problem("doubled", NamedInts(K=1 << 20))


@pytest.mark.gpu
def test_on_a_gpu_each_launch_of_a_graph_has_tensors_of_its_own() -> None:
    def launch(config: object, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        torch.mul(inputs[0], 2, out=outputs[0])

    spec = spec_of(launch)
    tensors = build_unchecked(spec, Edge("", PROBLEM), "cuda")
    replay = tensors.launcher(spec.default, 8)
    assert len(tensors.copies) == 7
    assert len({item.inputs[0].data_ptr() for item in (tensors, *tensors.copies)}) == 8
    replay()
    torch.cuda.synchronize()
    assert all(bool((item.outputs[0] == 2).all()) for item in (tensors, *tensors.copies))
    in_graph = trimmed_mean(block(replay).samples_us)
    by_events = trimmed_mean(block(tensors.launcher(spec.default)).samples_us)
    assert 1.0 < in_graph < by_events  # 8 MiB from memory take over 2 us, and events add the start


@pytest.mark.gpu
def test_on_a_gpu_a_launch_that_waits_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(config: object, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        outputs[0].copy_(inputs[0] * float(inputs[0].sum() / inputs[0].sum() + 1))

    tensors = build_unchecked(spec_of(launch), Edge("", PROBLEM), "cuda")
    monkeypatch.setattr(trial.tensor_cache, "tensors", lambda *_, **__: tensors)
    reason = trial.capture_failure(KernelArm("any", PROBLEM, NamedInts(num_warps=4), in_graph=4), "cuda")
    assert reason
    assert "\n" not in reason
    assert block(tensors.launcher(NamedInts(num_warps=4))).samples_us  # the process goes on
