"""Elements of an output that are right, by bytes and within a bound, and bytes beside it; fingerprints of inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from places import PLANTED
from planted_trials import SUMS

from fp8tune.measure import comparing, guards
from fp8tune.measure.checking import build
from fp8tune.measure.comparing import EXACT, Rule
from fp8tune.records import NamedInts, Problem
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.spec import Edge, Tolerance

BOUND = Rule(any_nan=True, tolerance=Tolerance(relative=0.01, absolute=0.5))
inf, nan = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def float8(*values: float) -> torch.Tensor:
    return torch.tensor(values).to(torch.float8_e4m3fn).view(1, -1)


@pytest.mark.parametrize(
    ("output", "expected", "message"),
    [
        (
            float8(0, 448, 1.5, 0),
            float8(0, 0.5, 2, 0),
            "2 of 4 elements differ, first at (0, 1): expected 0.5 (0x30), got 448 (0x7e)",
        ),
        (float8(1, 2).t(), float8(1, 2).t(), None),
        (
            torch.tensor([1.0, nan]),
            torch.tensor([1.0, 2.0]),
            "1 of 2 elements differ, first at (1,): expected 2 (0x40000000), got nan (0x7fc00000)",
        ),
        (
            torch.tensor(3, dtype=torch.uint8),
            torch.tensor(4, dtype=torch.uint8),
            "1 of 1 elements differ, first at (): expected 4 (0x04), got 3 (0x03)",
        ),
    ],
)
def test_a_message_shows_the_expected_value_and_the_output(output, expected, message) -> None:
    assert EXACT.difference(output, expected) == message


def test_an_output_that_changes_while_it_is_compared_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel on a stream of its own may write after the first look and before the count."""
    output = torch.zeros(8, dtype=torch.uint8)

    def late(self: Rule, *values: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: torch.tensor(True)

    monkeypatch.setattr(Rule, "comparison", late)
    assert "did not" in str(EXACT.difference(output, output.clone()))


def test_any_nan_is_any_other_on_exact_inputs() -> None:
    quiet, negative = (torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16) for bits in (0x7FC0, -64))
    assert Rule().difference(quiet, negative)
    assert Rule(any_nan=True).difference(quiet, negative) is None
    assert Rule(any_nan=True).difference(quiet, torch.ones(1, dtype=torch.bfloat16))


LAYOUTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda whole: whole.flatten()[:840].view(2, 21, 20),
    lambda whole: whole.flatten()[8:848].view(2, 21, 20).transpose(1, 2),
    lambda whole: whole.flatten()[3:843].view(2, 21, 20).permute(2, 0, 1),
    lambda whole: whole[:, :21, :20],
    lambda whole: whole.flatten()[:7],
]


def test_one_bit_that_differs_is_found_in_any_layout() -> None:
    dtypes = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64)
    for dtype, view in itertools.product(dtypes, LAYOUTS):
        generator = torch.Generator().manual_seed(0)
        memory = torch.randint(0, 100, (2, 24, 40 * 8), dtype=torch.uint8, generator=generator).view(dtype)
        right, alike = (view(whole) for whole in (memory, memory.clone()))
        plain = right.clone()  # dense, in an order of its own
        assert not any(bool(EXACT.comparison(right, copy)()) for copy in (alike, plain))
        for place in ((0,) * right.ndim, tuple(size - 1 for size in right.shape)):
            for changed in (alike.clone(), plain.clone(), plain.clone().contiguous()):
                comparing.bits(changed)[place] ^= 1
                assert bool(EXACT.comparison(changed, right)()), dtype
                assert bool(EXACT.comparison(right, changed)()), dtype


@pytest.mark.parametrize(
    ("value", "expected", "is_right"),
    [
        *((1.5, 1.0, True), (1.52, 1.0, False), (100, 101.4, True), (100, 101.6, False)),
        *((nan, nan, True), (nan, 1.0, False), (1.0, nan, False)),
        *((inf, inf, True), (-inf, inf, False), (inf, 3e38, False), (3e38, inf, False)),
        *((inf, 1e39, True), (-inf, 1e39, False)),  # float32 rounds 1e39 to infinity
    ],
)
def test_an_element_is_right_within_the_bound(value: float, expected: float, is_right: bool) -> None:
    output, right = torch.tensor([0.0, value]), torch.tensor([0.0, expected], dtype=torch.float64)
    assert (BOUND.difference(output, right) is None) == is_right
    assert bool(BOUND.comparison(output, right)()) != is_right


@pytest.mark.parametrize("elements", [1 << 24, 7, 1])
def test_a_bound_that_is_broken_says_by_what_and_where(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, too, which need not fit the shape."""
    monkeypatch.setattr(comparing, "_PIECE_ELEMENTS", elements)
    right = torch.arange(24, dtype=torch.float64).view(2, 12)
    output = right.float()
    assert BOUND.difference(output, right) is None
    output[1, 3], output[0, 5] = 17, 4
    assert BOUND.difference(output, right) == (
        "2 of 24 elements are out of bound, the largest error at (1, 3): expected 15, got 17, off by 2 where 0.65 "
        "is allowed (1e-02 relative + 5e-01 absolute)"
    )
    output[1, 11] = nan
    message = "3 of 24 elements are out of bound, the largest error at (1, 11): expected 23, got nan, off by inf where"
    assert str(BOUND.difference(output, right)).startswith(message)


@pytest.mark.parametrize("elements", [1 << 24, 7, 1])
def test_the_first_element_that_differs_is_named(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever piece it is in: pieces are along the longest dim, which need not be the first."""
    monkeypatch.setattr(comparing, "_PIECE_ELEMENTS", elements)
    right = torch.arange(24).view(2, 12)
    for output in (right.clone(), right.int()):
        output[0, 9], output[1, 2] = 99, 99
        message = "2 of 24 elements differ, first at (0, 9): expected 9 (0x0000000000000009), got 99 "
        assert str(EXACT.difference(output, right)).startswith(message)


def test_a_spoiled_output_is_wrong_everywhere() -> None:
    for dtype, number in itertools.product([*DTYPES, torch.int32, torch.bool], (0, 1)):
        right = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
        if dtype.is_floating_point:
            right[2:] = torch.tensor([nan, inf])
        else:
            right = right.to(torch.bool if dtype == torch.bool else torch.int64)
        output = torch.empty(4, dtype=dtype)
        BOUND.spoiler(output, right)(0 if dtype == torch.bool else number)
        assert str(BOUND.difference(output, right)).startswith("4 of 4 "), dtype


def test_a_row_says_how_it_was_checked() -> None:
    for changes, text in (
        ({}, "exact"),
        ({"check": "exact-inputs"}, "exact-inputs"),
        ({"tolerance": Tolerance(1e-3, 1e-5)}, "tolerance 1e-03 relative + 1e-05 absolute of float64"),
        ({"tolerance": Tolerance(0.0015)}, "tolerance 0.0015 relative of float64"),
    ):
        check = {"check": "tolerance"} if "tolerance" in changes else {}
        assert replace(load_spec(SUMS["EXACT"]), **changes, **check).check_text == text


@given(st.integers(0, 200), st.data())
def test_a_fingerprint_tells_any_changed_byte_and_any_two_swapped_words(size: int, data: st.DataObject) -> None:
    tensor = guards.guarded_copy(torch.arange(size, dtype=torch.uint8))
    own, before = guards.own_bytes(tensor), guards.fingerprint(tensor)
    guards.fill(tensor, 7)
    assert guards.fingerprint(tensor) == before
    if size:
        at = data.draw(st.integers(0, size - 1))
        own[at] = data.draw(st.integers(0, 255).filter(lambda value: value != at))
        assert guards.fingerprint(tensor) != before
        own[at] = at
    if size >= 16:
        own[:16] = own[:16].roll(8)
        assert guards.fingerprint(tensor) != before


@pytest.mark.parametrize("size", [0, 7, 8, 31, 32, 33, 64, 100, 200, 203])
def test_a_fingerprint_is_a_sum_of_weighted_chunks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It equals the sum of single chunks: stored hashes of outputs rest on it."""
    monkeypatch.setattr(guards, "_CHUNK_WORDS", 4)
    monkeypatch.setattr(guards, "_CHUNKS", 2)
    monkeypatch.setattr(guards, "_weights", lambda device: torch.tensor([3, 5, 7, 9]))
    values = torch.arange(size, dtype=torch.uint8)
    words = [int.from_bytes(bytes(values[at : at + 8].tolist()), "little") for at in range(0, size, 8)]
    whole, tail = words[: size // 8], words[size // 8 :]
    total = sum(tail)
    for at in range(0, len(whole) or 1, 4):
        total = total * guards._MULTIPLIER + sum(map(math.prod, zip(whole[at : at + 4], (3, 5, 7, 9), strict=False)))
    assert int(guards.fingerprint(guards.guarded_copy(values))) % 2**64 == total % 2**64


# Guard bytes

GUARD_BYTES = guards.guard_bytes("cuda" if torch.cuda.is_available() else "cpu")
LIKE: dict[str, Callable[[], torch.Tensor]] = {
    "row-major": lambda: torch.empty(5, 7, dtype=torch.float8_e4m3fn),
    "column-major": lambda: torch.empty_strided((5, 7), (1, 16), dtype=torch.float8_e4m3fn),
    "with padding": lambda: torch.empty(7 * 16, dtype=torch.uint8).as_strided((5, 7), (1, 16)),
    "four bytes": lambda: torch.empty(3, dtype=torch.float32),
    "a slice": lambda: torch.empty(10, dtype=torch.float32)[2:4],
    "nothing": lambda: torch.empty(0, 4, dtype=torch.float32),
    "on meta": lambda: torch.empty_strided((5, 7), (1, 16), dtype=torch.bfloat16, device="meta"),
}


@pytest.mark.parametrize("name", LIKE)
def test_an_output_lies_as_it_would_without_guards_and_a_byte_beside_it_is_found(name: str, device: str) -> None:
    like = LIKE[name]()
    output = guards.guarded(like, device)
    assert (output.shape, output.stride(), output.dtype) == (like.shape, like.stride(), like.dtype)
    assert output.device.type == device
    memory = guards.storage(output)
    assert len(memory) == like.untyped_storage().nbytes() + 2 * GUARD_BYTES
    begins = output.data_ptr() - memory.data_ptr() - like.storage_offset() * like.element_size()
    assert output.numel() == 0 or begins == GUARD_BYTES
    guards.fill(output)
    guards.own_bytes(output)[:] = 0  # its padding, too
    assert (guards.overwritten(output), bool(guards.is_overwritten(output))) == (None, False)
    for place, text in (
        (-GUARD_BYTES, "1 bytes written past its end, the first 0 bytes after it"),
        (-1, f"1 bytes written past its end, the first {GUARD_BYTES - 1} bytes after it"),
        (GUARD_BYTES - 1, "1 bytes written before its start, the last 1 bytes before it"),
        (0, f"1 bytes written before its start, the last {GUARD_BYTES} bytes before it"),
    ):
        guards.fill(output)
        memory[place] ^= 1
        assert (guards.overwritten(output), bool(guards.is_overwritten(output))) == (text, True)


@pytest.mark.parametrize(("past", "wrong"), [(0, None), (1, "4 bytes written past its end"), (-41, "before its start")])
def test_a_kernel_that_writes_beside_its_output_is_wrong(past: int, wrong: str | None, device: str) -> None:
    def launch(config: Any, values: tuple[Any, ...], out: tuple[Any, ...]) -> None:
        spec.launch(config, values, out)
        if past:
            out[0].as_strided((1,), (1,), out[0].storage_offset() + out[0].numel() - 1 + past).zero_()

    spec = load_spec(f"{PLANTED / 'faults.py'}:SPEC")
    edge = Edge("", Problem(spec.name, NamedInts(M=5, K=8), "ragged"))
    fault = build(replace(spec, launch=launch), edge, device).check(spec.default)
    assert fault is None if wrong is None else str(fault).startswith("output 0: ") and wrong in str(fault)
