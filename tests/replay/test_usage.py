"""Arguments that a kernel reads and writes, from its code: too many rather than too few."""

from __future__ import annotations

import pytest

from fp8tune.replay.program import usages
from fp8tune.replay.recording import Grid, Kernel, Launch, Scalar, Tensor
from fp8tune.replay.ttir import Use, usage_of

READ, WRITTEN, BOTH, NEITHER = Use(is_loaded=True), Use(is_stored=True), Use(True, True), Use()
TABLE, NUMBER, ADDRESS = Use(is_loaded=True, is_address=True), Use(), Use(is_address=True)

INTEGERS = ("at_ptr", "which_ptr", "offsets_ptr", "counts_ptr")
NUMBERS = {"n": 64, "M": 64, "N": 64, "BLOCK": 16, "to": 2**46, "seed": 2**46}

EXPECTED = {
    "loop": ({"a_ptr": READ, "b_ptr": WRITTEN, "c_ptr": WRITTEN}, ["n", "BLOCK"]),
    "until": ({"a_ptr": READ, "b_ptr": WRITTEN}, ["n"]),
    "atomic": ({"total_ptr": BOTH, "lock_ptr": BOTH, "unused_ptr": NEITHER}, []),
    "either": ({"flag_ptr": READ, "a_ptr": WRITTEN, "b_ptr": WRITTEN, "c_ptr": WRITTEN}, ["n"]),
    "in_place": ({"x_ptr": BOTH}, ["n", "BLOCK"]),
    "calls": ({"a_ptr": READ, "b_ptr": WRITTEN}, []),
    "descriptors": ({"source": READ, "target_ptr": WRITTEN}, ["M", "N", "BLOCK"]),
    "table": ({"at_ptr": TABLE, "sizes_ptr": READ, "out_ptr": WRITTEN}, []),
    "nested": ({"at_ptr": TABLE, "which_ptr": READ}, []),
    "address": ({"x_ptr": READ, "to": ADDRESS}, []),
    "in_assembly": ({"at_ptr": TABLE}, []),
    "aligned": ({"x_ptr": BOTH, "offsets_ptr": READ}, []),
    "seeded": ({"x_ptr": WRITTEN, "seed": NUMBER, "counts_ptr": READ}, []),
    "missing": ({}, []),
}


def test_compiled_code_tells_what_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels in one process: a launch has a matrix for each argument that is no number."""
    monkeypatch.chdir(__file__.rpartition("/")[0])
    work = []
    for kernel, (uses, numbers) in EXPECTED.items():
        tensors = [
            Tensor(name, "int64" if name in INTEGERS else "float32", (64, 64), (64, 1), descriptor=descriptor)
            for name in uses
            if name not in NUMBERS
            for descriptor in [(16, 16) if name == "source" else None]
        ]
        scalars = [Scalar(name, NUMBERS[name]) for name in (*numbers, *(name for name in uses if name in NUMBERS))]
        launch = Launch((*tensors, *scalars), Grid((), ()))
        parameters = tuple(item.name for item in launch.arguments)
        work.append((Kernel(f"compiled_kernels:{kernel}", is_autotuned=False, parameters=parameters), launch, None))
    answers = dict(zip(EXPECTED, usages(work), strict=True))
    expected = {kernel: {name: list(use) for name, use in uses.items()} for kernel, (uses, _) in EXPECTED.items()}
    assert answers == expected


PARAMETERS = "%x: !tt.ptr<f32>, %y: !tt.ptr<f32>, %n: i64"
SIGNATURE = {"x": "*fp32", "y": "*fp32", "n": "i64", "BLOCK": "constexpr"}
UNKNOWN = '{libname = "", libpath = "", pure = false, symbol = "f"} : (!tt.ptr<f32>) -> f32'


@pytest.mark.parametrize(
    ("lines", "x", "y"),
    [
        (["%0 = builtin.unrealized_conversion_cast %x : !tt.ptr<f32> to i32"], NEITHER, NEITHER),
        # an operation that is not known reads and writes all it takes
        ([f"%0 = tt.extern_elementwise %x {UNKNOWN}"], BOTH, NEITHER),
        # a pointer that is stored as a value may be used by anybody
        (
            [
                "%0 = tt.ptr_to_int %x : !tt.ptr<f32> -> i64",
                "%1 = tt.bitcast %y : !tt.ptr<f32> -> !tt.ptr<i64>",
                "tt.store %1, %0 : !tt.ptr<i64>",
            ],
            *(BOTH, WRITTEN),
        ),
        # branches between blocks are followed
        (
            [
                "%c = arith.cmpi slt, %n, %n : i64",
                "cf.cond_br %c, ^bb1(%x : !tt.ptr<f32>), ^bb2",
                "^bb1(%p: !tt.ptr<f32>):",
                "%0 = tt.load %p : !tt.ptr<f32>",
                "cf.br ^bb2",
                "^bb2:",
            ],
            *(READ, NEITHER),
        ),
    ],
)
def test_operations_are_followed(lines: list[str], x: Use, y: Use) -> None:
    body = "\n".join(lines)
    text = f"module {{\n  tt.func public @k({PARAMETERS}) {{\n{body}\n  tt.return\n  }}\n}}\n"
    assert usage_of(text, SIGNATURE) == {"x": x, "y": y, "n": NUMBER}


def test_names_come_from_the_signature_and_other_texts_are_refused() -> None:
    text = "module { tt.func public @k(%0: !tt.ptr<f32>, %1: !tt.ptr<f32>) { tt.return } }"
    assert usage_of(text, {"a": "*fp32", "N": "constexpr", "b": "*fp32"}) == {"a": NEITHER, "b": NEITHER}
    for refused, signature, why in (
        (text, {"a": "*fp32"}, "2 arguments, the signature 1"),
        ("module {}", {}, "the text"),
        ("def kernel(): pass", {}, "the text"),
    ):
        with pytest.raises(ValueError, match=why):
            usage_of(refused, signature)
