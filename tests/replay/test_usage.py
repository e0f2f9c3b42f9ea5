"""Arguments that a kernel reads and writes, from its code: too many rather than too few."""

from __future__ import annotations

from typing import Any

import pytest

from fp8tune.replay.recording import Grid, Kernel, Launch, Scalar, Tensor
from fp8tune.replay.ttir import usage_of
from fp8tune.replay.program import usages
from fp8tune.replay.ttir import Use

MODULE = "compiled_kernels"
READ, WRITTEN, BOTH, NEITHER = Use(is_loaded=True), Use(is_stored=True), Use(True, True), Use()
TABLE, NUMBER, ADDRESS = Use(is_loaded=True, is_address=True), Use(), Use(is_address=True)

INTEGERS = ("at_ptr", "which_ptr", "offsets_ptr", "counts_ptr")

EXPECTED = {
    "loop": {"a_ptr": READ, "b_ptr": WRITTEN, "c_ptr": WRITTEN},
    "until": {"a_ptr": READ, "b_ptr": WRITTEN},
    "atomic": {"total_ptr": BOTH, "lock_ptr": BOTH, "unused_ptr": NEITHER},
    "either": {"flag_ptr": READ, "a_ptr": WRITTEN, "b_ptr": WRITTEN, "c_ptr": WRITTEN},
    "in_place": {"x_ptr": BOTH},
    "calls": {"a_ptr": READ, "b_ptr": WRITTEN},
    "descriptors": {"source": READ, "target_ptr": WRITTEN},
    "table": {"at_ptr": TABLE, "sizes_ptr": READ, "out_ptr": WRITTEN},
    "nested": {"at_ptr": TABLE, "which_ptr": READ},
    "address": {"x_ptr": READ, "to": ADDRESS},
    "in_assembly": {"at_ptr": TABLE},
    "aligned": {"x_ptr": BOTH, "offsets_ptr": READ},
    "seeded": {"x_ptr": WRITTEN, "seed": NUMBER, "counts_ptr": READ},
    "missing": {},
}


def _launch(kernel: str) -> tuple[Kernel, Launch]:
    """A launch with a float32 matrix for each argument of the kernel, and the numbers it may take."""
    tensors = [
        Tensor(
            name,
            "int64" if name in INTEGERS else "float32",
            (64, 64),
            (64, 1),
            descriptor=(16, 16) if name == "source" else None,
        )
        for name in EXPECTED[kernel]
        if name not in ("to", "seed")
    ]
    numbers = {
        "loop": ["n", "BLOCK"],
        "until": ["n"],
        "either": ["n"],
        "in_place": ["n", "BLOCK"],
        "descriptors": ["M", "N", "BLOCK"],
    }.get(kernel, [])
    numbers += [name for name in EXPECTED[kernel] if name in ("to", "seed")]
    sizes = {"BLOCK": 16, "to": 2**46, "seed": 2**46}
    arguments = (*tensors, *(Scalar(name, sizes.get(name, 64)) for name in numbers))
    parameters = tuple(item.name for item in arguments)
    return Kernel(f"{MODULE}:{kernel}", is_autotuned=False, parameters=parameters), Launch(arguments, Grid((), ()))


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """All kernels, in one process."""
    folder = __file__.rpartition("/")[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return dict(zip(EXPECTED, usages([(*_launch(kernel), None) for kernel in EXPECTED]), strict=True))


@pytest.mark.parametrize("kernel", EXPECTED)
def test_compiled_code_tells_what_is_read_and_written(compiled: dict[str, Any], kernel: str) -> None:
    assert compiled[kernel] == EXPECTED[kernel]


SIGNATURE = {"x": "*fp32", "y": "*fp32", "n": "i64", "BLOCK": "constexpr"}


def _use(body: str, kind: str = "!tt.ptr<f32>") -> Any:
    arguments = f"%x: {kind}, %y: !tt.ptr<f32>, %n: i64"
    return usage_of(f"module {{\n  tt.func public @k({arguments}) {{\n{body}\n  tt.return\n  }}\n}}\n", SIGNATURE)


def test_an_operation_that_is_not_known_reads_and_writes_all_it_takes() -> None:
    body = "%0 = builtin.unrealized_conversion_cast %x : !tt.ptr<f32> to i32"
    assert _use(body)["x"] == NEITHER  # it only computes
    body = (
        '%0 = tt.extern_elementwise %x {libname = "", libpath = "", pure = false, symbol = "f"} : (!tt.ptr<f32>) -> f32'
    )
    assert (_use(body)["x"], _use(body)["y"]) == (BOTH, NEITHER)


def test_a_pointer_that_is_stored_as_a_value_may_be_used_by_anybody() -> None:
    body = (
        "%0 = tt.ptr_to_int %x : !tt.ptr<f32> -> i64\n"
        "%1 = tt.bitcast %y : !tt.ptr<f32> -> !tt.ptr<i64>\n"
        "tt.store %1, %0 : !tt.ptr<i64>"
    )
    assert _use(body) == {"x": BOTH, "y": WRITTEN, "n": NUMBER}


def test_branches_between_blocks_are_followed() -> None:
    body = (
        "%c = arith.cmpi slt, %n, %n : i64\n"
        "cf.cond_br %c, ^bb1(%x : !tt.ptr<f32>), ^bb2\n"
        "^bb1(%p: !tt.ptr<f32>):\n"
        "%0 = tt.load %p : !tt.ptr<f32>\n"
        "cf.br ^bb2\n"
        "^bb2:"
    )
    assert _use(body) == {"x": READ, "y": NEITHER, "n": NUMBER}


def test_names_come_from_the_signature() -> None:
    text = "module { tt.func public @k(%0: !tt.ptr<f32>, %1: !tt.ptr<f32>) { tt.return } }"
    assert usage_of(text, {"a": "*fp32", "N": "constexpr", "b": "*fp32"}) == {"a": NEITHER, "b": NEITHER}
    with pytest.raises(ValueError, match="2 arguments, the signature 1"):
        usage_of(text, {"a": "*fp32"})


@pytest.mark.parametrize("text", ["module {}", "def kernel(): pass"])
def test_a_text_without_a_kernel_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the text"):
        usage_of(text, {})
