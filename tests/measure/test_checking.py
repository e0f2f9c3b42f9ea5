"""What the check sees that one look at one launch would not: memory's answers, written inputs, edges, rare faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from places import PLANTED

from fp8tune.measure import checking, edges, guards, kept
from fp8tune.measure import trial as measure
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.comparing import EXACT
from fp8tune.measure.timing import Samples
from fp8tune.measure.worker import Worker
from fp8tune.records import NamedInts, Outcome, Problem, Status
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.spec import CONTENTS, Edge

REFERENCE = f"{PLANTED / 'launches.py'}:SPEC"
PROBLEM = Problem("planted-launches", NamedInts(M=6, K=16))


def config(fault: int) -> NamedInts:
    return NamedInts(FAULT=fault, num_warps=4)


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """As a worker begins: nothing built, nothing checked, no launch counted."""
    load_spec(REFERENCE).launch.__globals__["launches"].clear()
    measure._outcomes_on_edges.clear()
    kept.forget()
    yield
    kept.forget()


def clock(launches: int) -> measure.Clock:
    """Launches so many times and takes 100 us."""

    def block(launch: Callable[[], object], too_slow_us: float | None) -> Samples:
        for _ in range(launches):
            launch()
        return Samples((100.0,), None)

    return block


def trial(fault: int, device: str, of: Problem = PROBLEM, timing: measure.Clock | None = None) -> Outcome:
    arm = KernelArm(REFERENCE, of, config(fault))
    return measure.checked_block(arm, device, 0, times=timing is not None, clock=timing)


FOUND = {
    1: "output 0: 6 of 6 elements differ",
    2: "launch 2: output 0: 6 of 6 elements differ",
    3: "output 0: 6 of 6 elements differ",
    4: "launch 2: output 0: 6 of 6 elements differ",
    6: "input 0 was written",
    7: "input 0: ",
    8: "launch 2: output 0: ",
    9: "output 0: 1 of 6 elements differ, first at (5,)",
    10: "input 0 was written",
    11: "the edge 'infinity' (K=63 M=4, infinite)",
    12: "the edge 'one row'",
    13: "the edge 'alignment' (K=63 M=4, 1 elements past an aligned address)",
}


@pytest.mark.parametrize("fault", FOUND)
def test_a_fault_that_one_look_may_miss_is_found_and_harms_no_other(fault: int, device: str) -> None:
    outcome = trial(fault, device)
    assert outcome.status is Status.WRONG
    shown = outcome.reason.replace("M=4, K=63", "K=63 M=4").replace("M=4 K=63", "K=63 M=4")
    assert FOUND[fault] in shown, outcome.reason
    assert trial(0, device) == Outcome(Status.OK)


def test_the_last_timed_launch_is_looked_at(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right in the launches of the check and wrong thereafter: on the problem alone, for edges are launched too."""
    monkeypatch.setattr(measure, "edges_of", lambda spec, problem: ())
    monkeypatch.setattr(checking, "IN_A_ROW_BYTES", 0)
    outcome = trial(5, device, timing=clock(9))
    assert outcome.status is Status.WRONG
    assert outcome.reason.startswith("after timed launches: output 0: 6 of 6 elements differ")
    assert outcome.time_us is None
    assert trial(0, device, timing=clock(9)).time_us == 100.0


def test_what_no_launch_writes_is_right_after_timed_launches_too(device: str) -> None:
    """Rows past the last group's multiple of 128 are whoever prepares the outputs' to write."""
    problem = Problem("transposed-codes", NamedInts(M=40, K=32, G=3), "jagged", in_dtype="float8_e4m3fn")
    arm = KernelArm("transposed-codes", problem, load_spec("transposed-codes").default)
    assert measure.checked_block(arm, device, 0, clock=clock(1)).status is Status.OK


def test_a_config_is_judged_once_on_an_edge_that_problems_share(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "IN_A_ROW_BYTES", 0)
    launches = load_spec(REFERENCE).launch.__globals__["launches"]
    trial(0, device)
    first = launches[0]
    other = replace(PROBLEM, shape=NamedInts(M=8, K=16))
    assert trial(0, device, other).status is Status.OK
    assert launches[0] == first + checking.LAUNCHES
    assert trial(12, device, other).status is Status.WRONG


def test_edges_of_the_problem_before_are_let_go(device: str) -> None:
    spec = load_spec(REFERENCE)
    own = replace(spec, edges=lambda problem: [*spec.edges(problem), Edge("own", replace(problem, seed=1))])
    there: list[set[str]] = []
    for rows in (6, 7):
        problem = replace(PROBLEM, shape=NamedInts(M=rows, K=16))
        kept.forget({("x", edge) for edge in edges.edges_of(own, problem)})
        for edge in edges.edges_of(own, problem):
            kept._edge_tensors.setdefault(("x", edge), checking.build_edge(own, edge, device))
        there.append({f"{edge.name} {edge.problem.shape['M']}" for _, edge in kept._edge_tensors})
    assert there[1] - there[0] == {"own 7"}
    assert "own 6" not in there[1]


def test_a_message_shows_what_was_expected_and_what_came() -> None:
    right = torch.zeros(4, 8, dtype=torch.float8_e4m3fn)
    right[3, 5], right[3, 6] = 0.5, 2
    wrong = right.clone()
    wrong[3, 5], wrong[3, 6] = 448, 1.5
    assert EXACT.difference(wrong, right) == (
        "2 of 32 elements differ, first at (3, 5): expected 0.5 (0x30), got 448 (0x7e); largest difference 447.5"
    )
    assert EXACT.difference(right.t(), right.t()) is None
    lost = EXACT.difference(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]))
    assert lost == (
        "1 of 2 elements differ, first at (1,): expected 2 (0x40000000), got nan (0x7fc00000); no difference is finite"
    )
    assert EXACT.difference(torch.tensor(3, dtype=torch.uint8), torch.tensor(4, dtype=torch.uint8)) == (
        "1 of 1 elements differ, first at (): expected 4 (0x04), got 3 (0x03); largest difference 1"
    )


def test_an_output_of_another_form_than_the_references_is_said_so(device: str) -> None:
    spec = load_spec(REFERENCE)
    short = replace(spec, reference=lambda x: spec.reference(x)[:1])
    with pytest.raises(ValueError, match="its reference gives"):
        checking.build(short, PROBLEM, device)


def test_a_reference_may_work_in_place_and_return_its_input(device: str) -> None:
    spec = load_spec(REFERENCE)

    def launch(config: NamedInts, given: tuple, out: tuple) -> None:
        out[0].copy_(2 * given[0])

    doubling = replace(spec, reference=lambda x: (x.mul_(2),), outputs=lambda x: (x.new_empty(x.shape),), launch=launch)
    assert checking.build(doubling, PROBLEM, device).check(config(0)) is None


@given(st.integers(0, 200), st.data())
def test_a_fingerprint_tells_any_changed_byte_and_any_two_swapped_words(size: int, data: st.DataObject) -> None:
    tensor = guards.guarded_copy(torch.arange(size, dtype=torch.uint8))
    own, before = guards.own_bytes(tensor), checking.fingerprint(tensor)
    guards.fill(tensor, 7)
    assert checking.fingerprint(tensor) == before
    if size:
        at = data.draw(st.integers(0, size - 1))
        changed = data.draw(st.integers(0, 255).filter(lambda value: value != at))
        own[at] = changed
        assert checking.fingerprint(tensor) != before
        own[at] = at
    if size >= 16:
        own[:16] = own[:16].roll(8)
        assert checking.fingerprint(tensor) != before


LAYOUTS = {
    "row-major": lambda: torch.randn(5, 7),
    "a transposed view": lambda: torch.randn(5, 7).t(),
    "a slice": lambda: torch.randn(9)[2:7],
    "expanded": lambda: torch.randn(5, 1).expand(5, 7),
    "no elements": lambda: torch.randn(0, 4),
    "no dims": lambda: torch.tensor(2.5),
    "integers": lambda: torch.arange(5, dtype=torch.int32),
    "float8": lambda: torch.randn(6).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_input_between_guards_is_the_same_and_begins_where_it_was_asked_to(layout: str, offset: int) -> None:
    tensor = LAYOUTS[layout]()
    copy = guards.guarded_copy(tensor, offset)
    assert (copy.shape, copy.stride(), copy.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(copy.float(), tensor.float())
    past = (offset + tensor.storage_offset()) * tensor.element_size()
    assert not copy.numel() or (copy.data_ptr() - past) % 64 == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("content", CONTENTS)
def test_contents_are_what_they_are_called(content: str, dtype: torch.dtype) -> None:
    tensor = torch.randn(40, 61).to(dtype).t()
    edges.fill(tensor, content)
    values, limits = tensor.float(), torch.finfo(dtype)
    shown = {
        "random": len(values.unique()) > 10 and bool(values.isfinite().all()),
        "zeros": not values.any(),
        "nan": 0 < int(values.isnan().sum()) < values.numel() / 20,
        "infinite": limits.bits == 8 or 0 < int((~values.isfinite()).sum()) < values.numel() / 20,
        "tiny": 0 < float(values.abs().max()) < 8 * limits.smallest_normal
        and bool((values.abs() < limits.smallest_normal).any()),
        "huge": float(values.abs().max()) == limits.max,
        "integers": set(values.unique().tolist()) == {-1, -0.5, 0.5, 1},
    }
    assert shown[content]


def test_a_content_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="no content is called 'odd'"):
        edges.fill(torch.zeros(2), "odd")


def test_layouts_are_edges_of_every_kernel_with_groups() -> None:
    spec = load_spec(f"{PLANTED / 'faults.py'}:SPEC")
    problem = Problem(spec.name, NamedInts(M=4096, K=8), "balanced")
    found = edges.edges_of(spec, problem)
    assert {edge.problem.shape["M"] for edge in found} == {edges.LAYOUT_CHECK_ROWS}
    assert len({edge.problem.routing for edge in found}) == len(found) > 2


def test_an_edge_that_cannot_be_built_is_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Edge("odd", PROBLEM, "odd")
    monkeypatch.setattr(measure, "edges_of", lambda spec, problem: (odd,))
    outcome = trial(0, device)
    assert outcome.status is Status.COMPILE_ERROR
    assert "on the edge 'odd'" in outcome.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_somebody_elses_kernel_is_right_wherever_it_is_launched() -> None:
    """A spec that is loaded runs on the repaired interpreter: nothing of ours needs to have built its tensors."""
    launched = f"""
import sys, torch
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.spec import NamedInts, Problem
assert "fp8tune_kernels.interpreter" not in sys.modules
spec = load_spec({f"{PLANTED / 'foreign.py'}:SPEC"!r})
given = spec.inputs(Problem("foreign-cast", NamedInts(M=40, K=40)), "cpu")
out = spec.outputs(*given)
spec.launch(spec.default, given, out)
assert torch.equal(out[0].view(torch.uint8), spec.reference(*given)[0].view(torch.uint8))
"""
    worker = Worker()
    try:
        worker.call(60, exec, launched, {})
    finally:
        worker.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_somebody_elses_kernel_is_right_on_the_interpreter() -> None:
    """In a process that imports none of our kernels, and so is not repaired by them."""
    worker = Worker()
    try:
        foreign, problem = f"{PLANTED / 'foreign.py'}:SPEC", Problem("foreign-cast", NamedInts(M=40, K=40))
        arm = KernelArm(foreign, problem, NamedInts(BLOCK=256, num_warps=4))
        outcome = worker.call(60, measure.checked_block, arm, "cpu", 0, times=False)
    finally:
        worker.close()
    assert outcome == Outcome(Status.OK)
