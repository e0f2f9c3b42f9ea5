"""The three kinds of right: what each finds, and what a weaker one hides."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from places import PLANTED

from fp8tune.errors import UsageError
from fp8tune.measure import checking, comparing, edges, kept
from fp8tune.measure import trial as measure
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.comparing import EXACT, Rule
from fp8tune.measure.timing import Prepared, Samples
from fp8tune.records import NamedInts, Outcome, Problem, Status
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.spec import Edge, KernelSpec, Tolerance

PROBLEM = Problem("planted-sums", NamedInts(M=7, K=173))
KINDS = ("EXACT", "EXACT_INPUTS", "TOLERANCE")
ORDER, DROPPED, ADDS, MASK, NAN_SWALLOWED, NEIGHBOUR, PAST_END, INPUT, RACE, BELOW, ABOVE, NAN, LATER, COUNT = range(
    1, 15
)


def reference(kind: str) -> str:
    return f"{PLANTED / 'sums.py'}:{kind}"


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for kind in KINDS:
        load_spec(reference(kind)).launch.__globals__["launches"].clear()
    measure._outcomes_on_edges.clear()
    kept.forget()
    monkeypatch.setattr(checking, "IN_A_ROW_BYTES", 0)  # on a GPU too each look is seen by itself
    yield
    kept.forget()


def config(fault: int) -> NamedInts:
    return NamedInts(FAULT=fault, num_warps=4)


def trial(kind: str, fault: int, device: str, clock: measure.Clock | None = None) -> Outcome:
    arm = KernelArm(reference(kind), PROBLEM, config(fault))
    return measure.checked_block(arm, device, 0, times=clock is not None, clock=clock)


def tensors(kind: str, device: str, **changed: object) -> checking.Tensors:
    return checking.build(replace(load_spec(reference(kind)), **changed), PROBLEM, device)  # type: ignore[arg-type]


def launched(times: int, seen: list[object]) -> measure.Clock:
    """A clock that launches so often, and keeps what it was given."""

    def block(launch: Callable[[], object], too_slow_us: float | None) -> Samples:
        seen.append(launch)
        for _ in range(times):
            launch()
        return Samples((100.0,), None)

    return block


FOUND = {
    DROPPED: "on K=173 M=7",
    ADDS: "output 0: 7 of 7 elements",
    MASK: "on K=173 M=7",
    NAN_SWALLOWED: "the edge 'NaN'",
    NEIGHBOUR: "on K=173 M=7",
    PAST_END: "output 0: ",
    INPUT: "input 1 was written",
    NAN: "got nan",
    COUNT: "output 1: 1 of 1 elements differ",
}


@pytest.mark.parametrize("fault", FOUND)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_finds_what_is_wrong_however_it_sums(kind: str, fault: int, device: str) -> None:
    outcome = trial(kind, fault, device)
    assert outcome.status is Status.WRONG
    assert FOUND[fault] in outcome.reason.replace("M=7 K=173", "K=173 M=7"), outcome.reason


def test_another_order_of_a_sum_is_wrong_by_bytes_alone(device: str) -> None:
    assert {kind: trial(kind, ORDER, device).status for kind in KINDS} == {
        "EXACT": Status.WRONG,
        "EXACT_INPUTS": Status.OK,
        "TOLERANCE": Status.OK,
    }


@pytest.mark.parametrize("fault", [DROPPED, MASK, NEIGHBOUR, ABOVE])
def test_a_loose_bound_hides_what_exact_inputs_show(fault: int, device: str) -> None:
    assert tensors("LOOSE", device).check(config(fault)) is None
    assert tensors("EXACT_INPUTS", device, edges=lambda problem: ()).check(config(fault))


def test_nan_that_is_swallowed_shows_on_an_edge_alone(device: str) -> None:
    for kind in KINDS:
        assert tensors(kind, device).check(config(NAN_SWALLOWED)) is None
        assert "the edge 'NaN'" in trial(kind, NAN_SWALLOWED, device).reason


def test_the_bound_is_where_it_is_said_to_be(device: str) -> None:
    assert trial("TOLERANCE", BELOW, device) == Outcome(Status.OK)
    outcome = trial("TOLERANCE", ABOVE, device)
    assert outcome.status is Status.WRONG
    assert "7 of 7 elements are out of bound, the largest error at (" in outcome.reason
    assert "is allowed (1e-03 relative + 1e-03 absolute)" in outcome.reason


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_that_shows_once_in_fifty_launches_is_found_by_launches_in_a_row(kind: str, device: str) -> None:
    assert trial(kind, RACE, device) == Outcome(Status.OK)
    wrong = tensors(kind, device).check_in_a_row(config(RACE))
    assert wrong is not None
    assert wrong.startswith("3 of 150 launches in a row gave wrong outputs: launch ")
    assert "output 0: 1 of 7 elements " in wrong
    assert tensors(kind, device).check_in_a_row(config(0)) is None


@pytest.mark.parametrize("fault", [PAST_END, INPUT])
def test_what_launches_in_a_row_write_elsewhere_is_found(fault: int, device: str) -> None:
    assert tensors("EXACT_INPUTS", device).check_in_a_row(config(fault))


def test_launches_in_a_row_find_a_rare_fault_in_more_than_95_percent() -> None:
    timed = 3
    assert 1 - 0.98 ** (checking.IN_A_ROW + checking.LAUNCHES + timed) > 0.95


def test_a_gpu_is_asked_for_launches_in_a_row_and_the_interpreter_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the problem if it is small enough, else on an edge that is."""
    built = tensors("TOLERANCE", "cpu")
    asked: list[str] = []
    monkeypatch.setattr(checking.Tensors, "check_in_a_row", lambda self, config: asked.append(self.place) or "a race")
    arm = KernelArm(reference("TOLERANCE"), PROBLEM, config(0))
    monkeypatch.setattr(kept, "edge_tensors", lambda name, edge, device: checking.build_edge(built.spec, edge, "cpu"))
    assert measure._race(arm, built, "cpu") is None
    for limit in (1 << 20, 16 * 2500, 1):
        monkeypatch.setattr(checking, "IN_A_ROW_BYTES", limit)
        measure._race(arm, built, "cuda")
    assert asked == ["M=7 K=173", "the edge 'NaN' (M=3 K=97, nan)"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_wrong_while_it_is_timed_is_found(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "edges_of", lambda spec, problem: ())
    outcome = trial(kind, LATER, device, launched(9, []))
    assert outcome.status is Status.WRONG
    assert outcome.reason.startswith("after timed launches: output 0: 7 of 7 elements")
    assert trial(kind, 0, device, launched(9, [])).time_us == 100.0


# Exact inputs


def test_integers_are_checked_and_random_values_timed(device: str) -> None:
    built = tensors("EXACT_INPUTS", device)
    assert set(built.inputs[0].unique().tolist()) == {-1, -0.5, 0.5, 1}
    assert set(built.inputs[2].unique().tolist()) == {0.5, 1}
    assert built.refusal is None
    assert len(built.timed.inputs[0].unique()) > 100
    assert built.timed.outputs is built.outputs
    assert tensors("EXACT", device).timed.inputs[0].unique().numel() > 100
    built.timed.poison()
    built.timed.inputs[1][0] = 7
    assert "input 1 was written" in str(built.timed.wrong())


def test_a_constant_input_is_refused_though_the_integers_are_not_constant(device: str) -> None:
    def inputs(problem: Problem, device: str) -> tuple[object, ...]:
        x, *rest = load_spec(reference("EXACT")).inputs(problem, device)
        return torch.ones_like(x), *rest

    assert "input 0 has one value throughout" in str(tensors("EXACT_INPUTS", device, inputs=inputs).refusal)


@pytest.mark.parametrize("kind", ["EXACT", "EXACT_INPUTS"])
@pytest.mark.parametrize("constant", [set(range(1000)), {0, 1}], ids=["every seed", "two seeds"])
def test_what_cannot_be_timed_is_right_all_the_same(
    device: str, monkeypatch: pytest.MonkeyPatch, kind: str, constant: set[int]
) -> None:
    """Other seeds are tried first. A right config is never called wrong for its inputs, and a wrong one still is."""

    def inputs(problem: Problem, device: str) -> tuple[object, ...]:
        x, *rest = load_spec(reference("EXACT")).inputs(problem, device)
        return (torch.ones_like(x) if problem.seed in constant else x), *rest

    built = tensors(kind, device, inputs=inputs)
    monkeypatch.setattr(kept, "tensors", lambda *_: built)
    seen: list[object] = []

    def check(fault: int, clock: measure.Clock | None) -> Outcome:
        arm = KernelArm(reference(kind), PROBLEM, config(fault))
        return measure.checked_block(arm, device, 0, times=clock is not None, with_edges=False, clock=clock)

    timed = check(0, launched(1, seen))
    if len(constant) == 2:
        assert timed.status is Status.OK
        assert built.timed.inputs[0].unique().numel() > 100
    else:
        assert (timed.status, timed.time_us, seen) == (Status.UNTIMED, None, [])
        assert "input 0 has one value throughout" in timed.reason
    assert check(0, None).status is Status.OK  # where nothing is timed
    assert check(DROPPED, launched(1, seen)).status is Status.WRONG
    assert check(LATER, launched(6, seen)).status is (Status.WRONG if len(constant) == 2 else Status.UNTIMED)


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@given(st.sampled_from(DTYPES), st.sampled_from(["random", "huge", "tiny"]), st.integers(2, 400), st.randoms())
def test_sums_of_products_of_integers_are_the_same_in_any_order(
    dtype: torch.dtype, content: str, size: int, order: random.Random
) -> None:
    factors = [torch.empty(size, dtype=dtype) for _ in range(2)] + [torch.empty(size) for _ in range(2)]
    for seed, factor in enumerate(factors):
        edges.fill_integers(factor, seed, content if factor.dtype == dtype else "random", is_scale=seed > 1)
        assert not checking.is_constant(factor)
    product = factors[0].float() * factors[1].float() * factors[2] * factors[3]
    assert bool(product.ne(0).all())
    shuffled = list(range(size))
    order.shuffle(shuffled)
    assert float(product.cumsum(0)[-1]) == float(product[shuffled].cumsum(0)[-1])
    assert float(product.double().sum()) == float(product.sum())


def test_the_most_that_float32_sums_exactly_is_as_said() -> None:
    """Values of up to 2 halves, two scales of up to 2 halves, 2 ** 20 terms."""
    largest = 2**20 * 2**4
    assert float(torch.tensor(largest, dtype=torch.float32)) == largest
    assert torch.tensor(largest - 1, dtype=torch.float32).item() == largest - 1
    assert torch.finfo(torch.float32).max > 2**20 * (2.0**edges.LARGEST_EXPONENT) ** 4
    assert torch.finfo(torch.float32).smallest_normal < (2.0 ** (edges.SMALLEST_EXPONENT - 1)) ** 4


@pytest.mark.parametrize("content", ["nan", "infinite", "zeros"])
def test_integers_stand_between_what_else_an_edge_holds(content: str) -> None:
    tensor = torch.empty(5, 61, dtype=torch.bfloat16)
    edges.fill_integers(tensor, 0, content)
    odd = {"nan": tensor.isnan(), "infinite": tensor.isinf(), "zeros": tensor == 0}[content]
    assert bool(odd.any())
    assert set(tensor[~odd].tolist()) <= {-1, -0.5, 0.5, 1}


def test_integers_of_any_layout_are_seeded() -> None:
    for tensor in (torch.empty(3, 1).expand(3, 5), torch.empty(4, 6).t(), torch.empty(9)[2:7], torch.empty(0)):
        edges.fill_integers(tensor, 3)
        again = torch.empty_like(tensor)
        again.copy_(tensor)
        edges.fill_integers(tensor, 4)
        edges.fill_integers(tensor, 3)
        assert torch.equal(tensor, again)
    e8m0 = torch.empty(8, dtype=torch.float8_e8m0fnu)
    edges.fill_integers(e8m0, 0, is_scale=True)
    assert set(e8m0.float().tolist()) == {0.5, 1}


def test_any_nan_is_any_other_on_exact_inputs() -> None:
    quiet, negative = (torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16) for bits in (0x7FC0, -64))
    assert Rule().difference(quiet, negative)
    assert Rule(any_nan=True).difference(quiet, negative) is None
    assert Rule(any_nan=True).difference(quiet, torch.ones(1, dtype=torch.bfloat16))


# Within a tolerance

BOUND = Rule(any_nan=True, tolerance=Tolerance(relative=0.01, absolute=0.5))
inf, nan = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("got", "expected", "is_right"),
    [
        (1.5, 1.0, True),
        (1.52, 1.0, False),
        (100, 101.4, True),
        (100, 101.6, False),
        (nan, nan, True),
        (nan, 1.0, False),
        (1.0, nan, False),
        (inf, inf, True),
        (-inf, inf, False),
        (inf, 3e38, False),
        (3e38, inf, False),
        (inf, 1e39, True),  # what float32 rounds it to
        (-inf, 1e39, False),
    ],
)
def test_an_element_is_right_within_the_bound(got: float, expected: float, is_right: bool) -> None:
    output, right = torch.tensor([0.0, got]), torch.tensor([0.0, expected], dtype=torch.float64)
    assert (BOUND.difference(output, right) is None) == is_right
    assert bool(BOUND.differs(output, right)) != is_right


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize(
    "view",
    [
        lambda whole: whole.flatten()[:840].view(2, 21, 20),
        lambda whole: whole.flatten()[8:848].view(2, 21, 20).transpose(1, 2),
        lambda whole: whole.flatten()[3:843].view(2, 21, 20).permute(2, 0, 1),
        lambda whole: whole[:, :21, :20],
        lambda whole: whole.flatten()[:7],
    ],
)
def test_one_bit_that_differs_is_found_in_any_layout(dtype: torch.dtype, view: Callable[..., torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    memory = torch.randint(0, 100, (2, 24, 40 * 8), dtype=torch.uint8, generator=generator).view(dtype)
    right, alike = (view(each) for each in (memory, memory.clone()))
    plain = right.clone()  # dense, in an order of its own
    assert not any(bool(EXACT.differs(right, each)) for each in (alike, plain))
    for place in ((0,) * right.ndim, tuple(size - 1 for size in right.shape)):
        for other in (alike.clone(), plain.clone(), plain.clone().contiguous()):
            comparing.bits(other)[place] ^= 1
            assert bool(EXACT.differs(other, right))
            assert bool(EXACT.differs(right, other))


def test_a_bound_that_is_broken_says_by_what_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in pieces, which need not fit the shape."""
    right = torch.arange(24, dtype=torch.float64).view(2, 12)
    output = right.float()
    output[1, 3], output[0, 5], output[1, 11] = 17, 4, nan
    said = (
        "3 of 24 elements are out of bound, the largest error at (1, 11): expected 23, got nan, off by inf where 0.73"
    )
    assert str(BOUND.difference(output, right)).startswith(said)
    output[1, 11] = 23
    for elements in (1 << 24, 7, 1):
        monkeypatch.setattr(comparing, "_ELEMENTS_AT_ONCE", elements)
        assert BOUND.difference(output, right) == (
            "2 of 24 elements are out of bound, the largest error at (1, 3): expected 15, got 17, off by 2 where 0.65 "
            "is allowed (1e-02 relative + 5e-01 absolute)"
        )
        assert BOUND.difference(right.float(), right) is None


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32, torch.bool])
@pytest.mark.parametrize("number", [0, 1])
def test_a_spoiled_output_is_wrong_everywhere(dtype: torch.dtype, number: int) -> None:
    expected = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    if dtype.is_floating_point:
        expected[2:] = torch.tensor([nan, inf])
    output, right = torch.empty(4, dtype=dtype), expected if dtype.is_floating_point else expected.to(torch.int64)
    if dtype == torch.bool:
        right = right.bool()
    if dtype == torch.bool and number:
        return
    BOUND.spoil(output, right, number)
    assert str(BOUND.difference(output, right)).startswith("4 of 4 ")


# Outputs that are prepared


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_that_is_added_to_is_right_where_it_is_prepared(kind: str, device: str) -> None:
    assert trial(kind, ADDS, device).status is Status.WRONG
    seen: list[object] = []
    outcome = trial(f"PREPARED_{kind}", ADDS, device, launched(9, seen))
    assert outcome.status is Status.OK, outcome.reason
    assert isinstance(seen[0], Prepared)
    assert tensors(f"PREPARED_{kind}", device).check_in_a_row(config(ADDS)) is None
    assert trial(f"PREPARED_{kind}", DROPPED, device).status is Status.WRONG


def test_nothing_else_is_timed_another_way(device: str) -> None:
    seen: list[object] = []
    assert trial("TOLERANCE", 0, device, launched(2, seen)).status is Status.OK
    assert not isinstance(seen[0], Prepared)


def test_finals_prepare_as_well(device: str) -> None:
    launcher = KernelArm(reference("PREPARED_EXACT"), PROBLEM, config(ADDS)).launcher(device)
    launcher()
    launcher()
    built = kept.unchecked_tensors(reference("PREPARED_EXACT"), PROBLEM, device)
    assert torch.equal(built.outputs[0], built.spec.reference(*built.inputs)[0])


# What a spec declares


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({"check": "roughly"}, "check 'roughly' is refused: use one of exact, exact-inputs, tolerance"),
        ({"check": "tolerance"}, "check 'tolerance' with tolerance=None is refused"),
        ({"tolerance": Tolerance(1e-3)}, "check 'exact' with tolerance=Tolerance(relative=0.001, absolute=0.0"),
        ({"check": "tolerance", "tolerance": Tolerance(0.0)}, "is refused: use numbers from 0, and one of them above"),
        ({"check": "tolerance", "tolerance": Tolerance(-1.0, 1.0)}, "use numbers from 0"),
        ({"check": "tolerance", "tolerance": Tolerance(nan)}, "use numbers from 0"),
        ({"check": "tolerance", "tolerance": Tolerance("1e-3")}, "has a field that cannot be used"),
        ({"prepare": 3}, "prepare 3 is refused: use a function of (inputs, outputs)"),
    ],
)
def test_a_check_that_cannot_be_is_one_line(changed: dict[str, object], refused: str, monkeypatch) -> None:
    spec = load_spec(reference("EXACT"))
    module = __import__("sys").modules[spec.launch.__module__]
    monkeypatch.setattr(module, "ODD", replace(spec, **changed), raising=False)
    load_spec.cache_clear()
    monkeypatch.setattr("fp8tune.replay.loading._from_file", lambda path: module)
    with pytest.raises(UsageError) as raised:
        load_spec(reference("ODD"))
    assert refused in str(raised.value)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "exact"),
        ({"check": "exact-inputs"}, "exact-inputs"),
        (
            {"check": "tolerance", "tolerance": Tolerance(1e-3, 1e-5)},
            "tolerance 1e-03 relative + 1e-05 absolute of float64",
        ),
        ({"check": "tolerance", "tolerance": Tolerance(0.0015)}, "tolerance 0.0015 relative of float64"),
    ],
)
def test_a_row_says_how_it_was_checked(spec: dict[str, object], said: str) -> None:
    assert replace(load_spec(reference("EXACT")), **spec).check_text == said


def test_an_edge_with_its_own_integers_is_checked_by_bytes(device: str) -> None:
    spec: KernelSpec = load_spec(reference("EXACT"))
    built = checking.build_edge(spec, Edge("integers", PROBLEM, "integers"), device)
    assert built.check(config(ORDER)) is None
