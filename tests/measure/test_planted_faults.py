"""Every planted fault is found: in memory, inputs, edge cases, returned outputs, sums, and in rare launches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from places import PLANTED
from planted_trials import LAUNCHES, PROBLEMS, RETURNED, SUM, SUMS, config, fresh_process, run, run_timed, tensors

from fp8tune.measure import checking, edges, tensor_cache, trial
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.checking import TOO_SLOW_RATIO
from fp8tune.measure.timing import Prepared
from fp8tune.measure.worker import Poisoned, Worker
from fp8tune.records import NamedInts, Outcome, Problem, Status
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.spec import Edge

assert fresh_process
pytestmark = pytest.mark.usefixtures("fresh_process")

OK = Outcome(Status.OK)
KINDS = tuple(SUMS)
ORDER, DROPPED, ADDS, MASK, NAN_SWALLOWED, NEIGHBOUR, PAST_END, INPUT, RACE, BELOW, ABOVE, NAN, LATER, COUNT = range(
    1, 15
)

ONE_LOOK_MAY_MISS = {
    1: "output 0: 6 of 6 elements differ",
    2: "launch 2: output 0: 6 of 6 elements differ",
    3: "output 0: 6 of 6 elements differ",
    4: "launch 2: output 0: 6 of 6 elements differ",
    6: "input 0 was written",
    7: "input 0: ",
    8: "launch 2: output 0: ",
    9: "output 0: 1 of 6 elements differ, first at (5,)",
    10: "input 0 was written",
    11: "the edge 'infinity' (M=4 K=63, infinite)",
    12: "the edge 'one row'",
    13: "the edge 'alignment' (M=4 K=63, 1 elements past an aligned address)",
}
IN_RETURNED = {
    2: "output 0: 1 of 96 elements differ, first at (5, 15)",
    3: "output 1: the launch returned torch.float32 of shape (6, 1) and strides (1, 1) on ",
    4: "output 1: the launch returned torch.float64 of shape (6,)",
    5: "output 1: the launch returned NoneType, wanted a tensor",
    6: "the launch returned 1 outputs, wanted 2",
    7: "launch 2: output 0: 96 of 96 elements differ",
    8: "output 0: the launch returned torch.float32 of shape (6, 16) and strides (1, 6) on ",
    9: "output 0: 96 of 96 elements differ",
}
IN_SUMS = {
    DROPPED: "on M=7 K=173",
    ADDS: "output 0: 7 of 7 elements",
    MASK: "on M=7 K=173",
    NAN_SWALLOWED: "the edge 'NaN'",
    NEIGHBOUR: "on M=7 K=173",
    PAST_END: "output 0: ",
    INPUT: "input 1 was written",
    NAN: "got nan",
    COUNT: "output 1: 1 of 1 elements differ",
}


def in_order(text: str) -> str:
    """Sizes as this test writes them, whatever the order of a shape."""
    return text.replace("K=173 M=7", "M=7 K=173").replace("K=63 M=4", "M=4 K=63")


@pytest.mark.parametrize(
    ("reference", "fault", "message"),
    [
        *((LAUNCHES, fault, message) for fault, message in ONE_LOOK_MAY_MISS.items()),
        *((RETURNED, fault, message) for fault, message in IN_RETURNED.items()),
        *((reference, fault, message) for reference in SUMS.values() for fault, message in IN_SUMS.items()),
    ],
    ids=lambda value: value.rpartition("/")[2] if isinstance(value, str) and "/" in value else str(value)[:30],
)
def test_a_fault_is_found_and_harms_no_other_config(reference: str, fault: int, message: str, device: str) -> None:
    outcome = run(reference, fault, device)
    assert outcome.status is Status.WRONG
    assert message in in_order(outcome.reason), outcome.reason
    assert run(reference, 0, device) == OK


@pytest.mark.parametrize("fault", [0, 1])
def test_outputs_are_right_whether_they_are_returned_or_written(fault: int, device: str) -> None:
    assert run(RETURNED, fault, device) == OK
    assert run_timed(RETURNED, fault, device)[0].time_us == 100.0


@pytest.mark.parametrize(
    ("reference", "fault", "message"),
    [
        (LAUNCHES, 5, "output 0: 6 of 6 elements differ"),
        (RETURNED, 10, "output 1: 6 of 6 elements differ"),
        *((reference, LATER, "output 0: 7 of 7 elements") for reference in SUMS.values()),
    ],
)
def test_the_last_timed_launch_is_checked_and_revokes_a_pass(reference, fault, message, device, monkeypatch) -> None:
    """Right in the launches of the check and wrong thereafter; edges and launches in a row would find it sooner."""
    monkeypatch.setattr(trial, "edges_of", lambda spec, problem: ())
    monkeypatch.setattr(checking, "IN_A_ROW_BYTES", 0)
    outcome, _ = run_timed(reference, fault, device)
    assert (outcome.status, outcome.time_us) == (Status.WRONG, None)
    assert outcome.reason.startswith(f"after timed launches: {message}")
    assert config(fault) not in tensor_cache.tensors(reference, PROBLEMS.get(reference, SUM), device).passed
    assert run_timed(reference, 0, device)[0].time_us == 100.0


def test_outputs_that_no_launch_writes_are_right_after_timed_launches_too(device: str) -> None:
    """Rows past the last group's multiple of 128 are written by whoever prepares the outputs."""
    problem = Problem("transposed-codes", NamedInts(M=40, K=32, G=3), "jagged", in_dtype="float8_e4m3fn")
    built = checking.build(load_spec("transposed-codes"), Edge("", problem), device)
    built.poison()
    built.prepare(built.spec.default)
    built.launch(built.spec.default)
    assert built.wrong() is None


def test_another_order_of_a_sum_is_wrong_by_bytes_alone(device: str) -> None:
    statuses = [run(reference, ORDER, device).status for reference in SUMS.values()]
    assert statuses == [Status.WRONG, Status.OK, Status.OK]
    built = checking.build(load_spec(SUMS["EXACT"]), Edge("integers", SUM, "integers"), device)
    assert built.check(config(ORDER)) is None


@pytest.mark.parametrize("fault", [DROPPED, MASK, NEIGHBOUR, ABOVE])
def test_a_loose_bound_hides_faults_that_exact_inputs_show(fault: int, device: str) -> None:
    assert tensors("LOOSE", device).check(config(fault)) is None
    assert tensors("EXACT_INPUTS", device, edges=lambda problem: ()).check(config(fault))


def test_an_error_is_found_above_the_bound_and_not_below(device: str) -> None:
    assert run(SUMS["TOLERANCE"], BELOW, device) == OK
    outcome = run(SUMS["TOLERANCE"], ABOVE, device)
    assert "7 of 7 elements are out of bound, the largest error at (" in outcome.reason
    assert "is allowed (1e-03 relative + 1e-03 absolute)" in outcome.reason


# Launches in a row


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_that_shows_once_in_fifty_launches_is_found_by_launches_in_a_row(kind: str, device: str) -> None:
    fault = str(tensors(kind, device).check_in_a_row(config(RACE)))
    assert fault.startswith("3 of 150 launches in a row gave wrong outputs: launch ")
    assert "output 0: 1 of 7 elements " in fault
    built = tensors(kind, device)
    assert [bool(built.check_in_a_row(config(fault), 8)) for fault in (0, PAST_END, INPUT)] == [False, True, True]
    assert tensors(f"PREPARED_{kind}", device).check_in_a_row(config(ADDS), 8) is None


@pytest.mark.parametrize(("fault", "wrong"), [(5, 8), (7, 7), (10, 4)])
def test_launches_in_a_row_check_the_outputs_that_each_returns(fault: int, wrong: int, device: str) -> None:
    built = checking.build(load_spec(RETURNED), Edge("", PROBLEMS[RETURNED]), device)
    assert built.check_in_a_row(config(0), 8) is None
    assert f"{wrong} of 8 launches in a row gave wrong outputs" in str(built.check_in_a_row(config(fault), 8))
    assert built.check_in_a_row(config(0), 8) is None


def test_a_gpu_launches_in_a_row_once_and_the_interpreter_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the problem if it is small enough, else on an edge that is."""
    built, places = tensors("TOLERANCE", "cpu"), list[str]()
    monkeypatch.setattr(checking.Tensors, "check_in_a_row", lambda self, config: places.append(self.place) or "a race")
    arm, on_edge = KernelArm(SUMS["TOLERANCE"], SUM, config(0)), checking.build
    monkeypatch.setattr(tensor_cache, "edge_tensors", lambda name, edge, device: on_edge(built.spec, edge, "cpu"))
    assert trial._race(arm, built, "cpu") is None
    for limit in (1 << 20, 16 * 2500, 1):
        monkeypatch.setattr(checking, "IN_A_ROW_BYTES", limit)
        trial._race(arm, built, "cuda")
    assert places == ["M=7 K=173", "the edge 'NaN' (M=3 K=97, nan)"]
    assert 1 - 0.98 ** (checking.IN_A_ROW + checking.LAUNCHES + 3) > 0.95


def test_a_config_that_did_not_race_on_one_size_may_be_spared_others(monkeypatch: pytest.MonkeyPatch) -> None:
    fault, launched = ["a race"], list[str]()
    monkeypatch.setattr(trial, "_without_race", set())
    monkeypatch.setattr(
        checking.Tensors, "check_in_a_row", lambda self, config: launched.append(self.place) or fault[0]
    )

    def race(K: int, *, races_once: bool) -> str | None:
        problem = replace(SUM, shape=NamedInts(M=7, K=K))
        arm = KernelArm(SUMS["EXACT"], problem, config(0), races_once=races_once)
        return trial._race(arm, checking.build(load_spec(SUMS["EXACT"]), Edge("", problem), "cpu"), "cuda")

    assert race(8, races_once=True) == "a race"
    fault[0] = ""
    for K, races_once in ((8, True), (16, True), (24, False), (32, True)):
        assert not race(K, races_once=races_once)
    assert launched == ["M=7 K=8", "M=7 K=8", "M=7 K=24"]


# Timed launches


def test_only_the_first_round_gives_up_on_a_config(device: str) -> None:
    """Three launches that a machine stalled once passed for a slow config in its third round."""
    _, calls = run_timed(LAUNCHES, 0, device, rounds=(0, 0, 1, 2))
    assert [too_slow_us for _, too_slow_us in calls] == [float("inf"), TOO_SLOW_RATIO * 100, None, None]


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_that_is_added_to_is_right_if_it_is_prepared(kind: str, device: str) -> None:
    prepared = f"{PLANTED / 'sums.py'}:PREPARED_{kind}"
    outcome, [(launch, _)] = run_timed(prepared, ADDS, device)
    assert (outcome.status, isinstance(launch, Prepared)) == (Status.OK, True), outcome.reason
    assert run(prepared, DROPPED, device).status is Status.WRONG
    launcher = KernelArm(prepared, SUM, config(ADDS)).launcher(device)  # of a final
    launcher()
    launcher()
    built = tensor_cache.tensors(prepared, SUM, device, is_checked=False)
    torch.testing.assert_close(built.outputs[0], built.spec.reference(*built.inputs)[0].float())
    _, [(launch, _)] = run_timed(SUMS[kind], 0, device, launches=2)
    assert not isinstance(launch, Prepared)


def test_integers_are_checked_and_random_values_timed(device: str) -> None:
    built = tensors("EXACT_INPUTS", device)
    assert set(built.inputs[0].unique().tolist()) == {-1, -0.5, 0.5, 1}
    assert set(built.inputs[2].unique().tolist()) == {0.5, 1}
    assert (built.timed.refusal, built.timed.outputs is built.outputs) == (None, True)
    assert len(built.timed.inputs[0].unique()) > 100
    built.timed.poison()
    built.timed.inputs[1][0] = 7
    assert "input 1 was written" in str(built.timed.wrong())


@pytest.mark.parametrize("kind", ["EXACT", "EXACT_INPUTS"])
@pytest.mark.parametrize("constant", [set(range(1000)), {0, 1}], ids=["every seed", "two seeds"])
def test_inputs_that_cannot_be_timed_are_checked_all_the_same(device, monkeypatch, kind, constant) -> None:
    """Other seeds are tried first. A right config is never called wrong for its inputs, and a wrong one still is."""

    def inputs(problem: Problem, device: str) -> tuple[object, ...]:
        x, *rest = load_spec(SUMS["EXACT"]).inputs(problem, device)
        return (torch.ones_like(x) if problem.seed in constant else x), *rest

    monkeypatch.setattr(trial, "edges_of", lambda spec, problem: ())
    monkeypatch.setattr(checking, "IN_A_ROW_BYTES", 0)
    built = tensors(kind, device, inputs=inputs)
    monkeypatch.setattr(tensor_cache, "tensors", lambda *_: built)
    outcome, calls = run_timed(SUMS[kind], 0, device, launches=1)
    is_timed = len(constant) == 2
    assert (outcome.status, len(calls)) == ((Status.OK, 1) if is_timed else (Status.UNTIMED, 0))
    assert is_timed or "input 0 has one value throughout" in outcome.reason
    assert built.timed.inputs[0].unique().numel() > 100 or not is_timed
    assert run(SUMS[kind], 0, device).status is Status.OK  # nothing is timed
    assert run_timed(SUMS[kind], DROPPED, device)[0].status is Status.WRONG
    assert run_timed(SUMS[kind], LATER, device)[0].status is (Status.WRONG if is_timed else Status.UNTIMED)


# Edges, and the tensors of a process


def test_a_config_is_judged_once_on_an_edge_that_problems_share(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "IN_A_ROW_BYTES", 0)
    launches = load_spec(LAUNCHES).launch.__globals__["launches"]
    run(LAUNCHES, 0, device)
    first, larger = launches[0], replace(PROBLEMS[LAUNCHES], shape=NamedInts(M=8, K=16))
    assert run(LAUNCHES, 0, device, larger).status is Status.OK
    assert launches[0] == first + checking.LAUNCHES
    assert run(LAUNCHES, 12, device, larger).status is Status.WRONG


def test_edges_of_the_problem_before_are_freed(device: str) -> None:
    spec, names = load_spec(LAUNCHES), list[set[str]]()
    own = replace(spec, edges=lambda problem: [*spec.edges(problem), Edge("own", replace(problem, seed=1))])
    for rows in (6, 7):
        problem = replace(PROBLEMS[LAUNCHES], shape=NamedInts(M=rows, K=16))
        tensor_cache.clear({("x", edge) for edge in edges.edges_of(own, problem)})
        for edge in edges.edges_of(own, problem):
            tensor_cache._edge_tensors.setdefault(("x", edge), checking.build(own, edge, device))
        names.append({f"{edge.name} {edge.problem.shape['M']}" for _, edge in tensor_cache._edge_tensors})
    assert (names[1] - names[0], names[0] - names[1]) == ({"own 7"}, {"own 6"})


def test_no_output_of_the_launch_before_is_held_beside_the_next(device: str) -> None:
    built = checking.build_unchecked(load_spec(RETURNED), Edge("", PROBLEMS[RETURNED]), device)
    built.launch(config(0))
    assert built.written is built.returned
    built.launch(config(1))
    assert built.returned is None
    assert torch.equal(built.written[0], 2 * built.inputs[0])


def test_an_edge_that_cannot_be_built_is_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "edges_of", lambda spec, problem: (Edge("odd", PROBLEMS[LAUNCHES], "odd"),))
    outcome = run(LAUNCHES, 0, device)
    assert (outcome.status, "on the edge 'odd'" in outcome.reason) == (Status.COMPILE_ERROR, True)


def test_a_reference_may_work_in_place_and_must_have_the_outputs_form(device: str) -> None:
    spec, edge = load_spec(LAUNCHES), Edge("", PROBLEMS[LAUNCHES])

    def launch(config: NamedInts, inputs: tuple, out: tuple) -> None:
        out[0].copy_(2 * inputs[0])

    doubling = replace(spec, reference=lambda x: (x.mul_(2),), outputs=lambda x: (x.new_empty(x.shape),), launch=launch)
    assert checking.build(doubling, edge, device).check(config(0)) is None
    with pytest.raises(ValueError, match="its reference gives"):
        checking.build(replace(spec, reference=lambda x: spec.reference(x)[:1]), edge, device)


# A device error breaks the GPU context of its process

RAISE = "raise RuntimeError('CUDA error: an illegal memory access was encountered')"
REASON = "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_a_broken_context_ends_the_process_with_its_reason(tmp_path: Path) -> None:
    """Inputs break it if K is 13, and FAULT 7 does on one group layout: no other row is blamed."""
    text = (PLANTED / "faults.py").read_text()
    text = text.replace("    generator =", f"    if problem.shape['K'] == 13:\n        {RAISE}\n    generator =")
    copy = 'out[0].copy_(2 * x + (routing == "one-giant"))'
    text = text.replace(copy, f"if routing == 'one-giant':\n                {RAISE}\n            {copy}")
    (tmp_path / "poisonous.py").write_text(text)
    reference = f"{tmp_path}/poisonous.py:SPEC"
    breaking, right = (Problem("planted-faults", NamedInts(M=64, K=K), routing="balanced") for K in (13, 8))
    with pytest.raises(Poisoned):
        trial.prepare(reference, breaking, "cpu")
    with pytest.raises(Poisoned) as raised:
        trial.build(KernelArm(reference, breaking, config(7)), "cpu")
    assert raised.value.value == Outcome(Status.CRASHED, reason=REASON)
    with pytest.raises(Poisoned) as raised:
        trial.checked_block(KernelArm(reference, right, config(7)), "cpu", 0, times=False)
    outcome = raised.value.value
    assert isinstance(outcome, Outcome)
    assert outcome.status is Status.CRASHED
    assert outcome.reason.startswith(f"{REASON}, on the edge 'one-giant routing'")


FOREIGN = f"{PLANTED / 'foreign.py'}:SPEC"
LAUNCHED = f"""
import sys, torch
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.spec import NamedInts, Problem
assert "fp8tune_kernels.interpreter" not in sys.modules
spec = load_spec({FOREIGN!r})
inputs = spec.inputs(Problem("foreign-cast", NamedInts(M=40, K=40)), "cpu")
out = spec.outputs(*inputs)
spec.launch(spec.default, inputs, out)
assert torch.equal(out[0].view(torch.uint8), spec.reference(*inputs)[0].view(torch.uint8))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_somebody_elses_kernel_is_right_on_the_interpreter() -> None:
    """In a process that imports none of our kernels, as a bare launch and as a trial."""
    worker = Worker()
    try:
        worker.call(60, exec, LAUNCHED, {})
        arm = KernelArm(FOREIGN, Problem("foreign-cast", NamedInts(M=40, K=40)), NamedInts(BLOCK=256, num_warps=4))
        assert worker.call(60, trial.checked_block, arm, "cpu", 0, times=False) == OK
    finally:
        worker.close()
