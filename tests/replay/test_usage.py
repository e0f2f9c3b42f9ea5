"""Arguments that a kernel reads and writes, from its code: too many rather than too few."""

from __future__ import annotations

import compiled_kernels
import pytest

from fp8tune.replay.program import usages
from fp8tune.replay.recording import Grid, Kernel, Launch, Scalar, Tensor
from fp8tune.replay.ttir import Use, usage_of

READ, WRITTEN, BOTH, NEITHER = Use(is_loaded=True), Use(is_stored=True), Use(True, True), Use()
PREFIXES = {
    **{"r": READ, "w": WRITTEN, "rw": BOTH, "no": NEITHER, "i": READ},
    **{"at": Use(is_loaded=True, is_address=True), "to": Use(is_address=True), "seed": NEITHER},
}
NUMBERS = {"n": 64, "M": 64, "N": 64, "BLOCK": 16, "to": 2**46, "seed": 2**46}


def test_compiled_code_tells_what_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels in one process, and one that is not there: a launch has a matrix for each argument in memory."""
    monkeypatch.chdir(__file__.rpartition("/")[0])
    work, expected = [], {}
    kernels = {name: item.arg_names for name, item in vars(compiled_kernels).items() if hasattr(item, "arg_names")}
    assert len(kernels) == 15
    for kernel, names in {**kernels, "missing": []}.items():
        arguments = [
            Scalar(name, NUMBERS[name])
            if name in NUMBERS
            else Tensor(
                name,
                "int64" if name.startswith(("at_", "i_")) else "float32",
                (64, 64),
                (64, 1),
                descriptor=(16, 16) if name == "r_source" else None,
            )
            for name in names
        ]
        if not kernel.startswith("_"):
            uses = {name: PREFIXES.get(name.partition("_")[0]) for name in names}
            expected[kernel] = {name: list(use) for name, use in uses.items() if use is not None}
            launch, parameters = Launch(tuple(arguments), Grid((), ())), tuple(names)
            work.append((Kernel(f"compiled_kernels:{kernel}", is_autotuned=False, parameters=parameters), launch, None))
    assert dict(zip(expected, usages(work), strict=True)) == expected


PARAMETERS = "%x: !tt.ptr<f32>, %y: !tt.ptr<f32>, %n: i64"
SIGNATURE = {"x": "*fp32", "y": "*fp32", "n": "i64", "BLOCK": "constexpr"}
STORED_POINTER = """
    %0 = tt.ptr_to_int %x : !tt.ptr<f32> -> i64
    %1 = tt.bitcast %y : !tt.ptr<f32> -> !tt.ptr<i64>
    tt.store %1, %0 : !tt.ptr<i64>
"""
BRANCHES = """
    %c = arith.cmpi slt, %n, %n : i64
    cf.cond_br %c, ^bb1(%x : !tt.ptr<f32>), ^bb2
    ^bb1(%p: !tt.ptr<f32>):
    %0 = tt.load %p : !tt.ptr<f32>
    cf.br ^bb2
    ^bb2:
"""
UNKNOWN = (
    '%0 = tt.extern_elementwise %x {libname = "", libpath = "", pure = false, symbol = "f"} : (!tt.ptr<f32>) -> f32'
)


@pytest.mark.parametrize(
    ("body", "x", "y"),
    [
        ("%0 = builtin.unrealized_conversion_cast %x : !tt.ptr<f32> to i32", NEITHER, NEITHER),
        (UNKNOWN, BOTH, NEITHER),  # an operation that is not known reads and writes all it takes
        (STORED_POINTER, BOTH, WRITTEN),  # a pointer that is stored as a value may be used by anybody
        (BRANCHES, READ, NEITHER),
    ],
)
def test_operations_are_followed(body: str, x: Use, y: Use) -> None:
    text = f"module {{\n  tt.func public @k({PARAMETERS}) {{\n{body}\n  tt.return\n  }}\n}}\n"
    assert usage_of(text, SIGNATURE) == {"x": x, "y": y, "n": NEITHER}


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
