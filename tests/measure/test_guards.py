"""A write beside an output is found, whatever the output's layout, and the check of a sweep says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from places import PLANTED

from fp8tune.measure import guards
from fp8tune.measure.checking import build
from fp8tune.records import NamedInts, Problem
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.spec import Edge

FAULTS = f"{PLANTED / 'faults.py'}:SPEC"

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


@pytest.fixture(params=LIKE)
def like(request: pytest.FixtureRequest) -> torch.Tensor:
    return LIKE[request.param]()


def everything(output: torch.Tensor) -> torch.Tensor:
    """The storage of a tensor, guard bytes and all, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=output.device).set_(output.untyped_storage())


def test_an_output_lies_as_it_would_without_guards(like: torch.Tensor, device: str) -> None:
    output = guards.guarded(like, device)
    assert (output.shape, output.stride(), output.dtype) == (like.shape, like.stride(), like.dtype)
    assert output.device.type == device
    own_bytes = like.untyped_storage().nbytes()
    assert len(everything(output)) == own_bytes + 2 * GUARD_BYTES
    begins = output.data_ptr() - everything(output).data_ptr() - like.storage_offset() * like.element_size()
    assert output.numel() == 0 or begins == GUARD_BYTES
    guards.fill(output)
    guards.own_bytes(output)[:] = 0  # its padding, too
    assert guards.overwritten(output) is None


@pytest.mark.parametrize(
    ("at", "says"),
    [
        (-GUARD_BYTES, "1 bytes written past its end, the first 0 bytes after it"),
        (-1, f"1 bytes written past its end, the first {GUARD_BYTES - 1} bytes after it"),
        (GUARD_BYTES - 1, "1 bytes written before its start, the last 1 bytes before it"),
        (0, f"1 bytes written before its start, the last {GUARD_BYTES} bytes before it"),
    ],
)
def test_one_byte_beside_it_is_found(like: torch.Tensor, device: str, at: int, says: str) -> None:
    output = guards.guarded(like, device)
    guards.fill(output)
    everything(output)[at] ^= 1
    assert guards.overwritten(output) == says


@pytest.mark.parametrize(("past", "wrong"), [(0, None), (1, "4 bytes written past its end"), (-41, "before its start")])
def test_a_kernel_that_writes_beside_its_output_is_wrong(past: int, wrong: str | None, device: str) -> None:
    def launch(config: Any, values: tuple[Any, ...], out: tuple[Any, ...]) -> None:
        spec.launch(config, values, out)
        if past:
            beside = out[0].as_strided((1,), (1,), out[0].storage_offset() + out[0].numel() - 1 + past)
            beside.zero_()

    spec = load_spec(FAULTS)
    edge = Edge("", Problem(spec.name, NamedInts(M=5, K=8), "ragged"))
    tensors = build(replace(spec, launch=launch), edge, device)
    fault = tensors.check(spec.default)
    assert fault is None if wrong is None else str(fault).startswith("output 0: ") and wrong in str(fault)
