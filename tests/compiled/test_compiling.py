"""Compiling for arches that are not here: the facts are each arch's own, whatever was compiled before."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fp8tune.measure import compiling, edges
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.spec import Edge, NamedInts, Problem

SCRIPT = r"""
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from fp8tune.measure.compiling import compile_config, distinct
from fp8tune_kernels.spec import NamedInts, Problem

def compiled(arch, fp8_dtype, num_stages=1, **options):
    problem = Problem("rowwise-2d", NamedInts(M=64, K=512), fp8_dtype=fp8_dtype)
    config = NamedInts(BLOCK_SIZE=1, BLOCK_SIZE_ITER=1024, num_warps=4, num_stages=num_stages, **options)
    return asdict(compile_config("rowwise-2d", problem, config, arch, 200_000, read_code=arch != "sm_90"))

def refused_by_the_assembler():
    with tempfile.TemporaryDirectory() as folder:
        assembler = Path(folder) / "ptxas"
        assembler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "release 12.8, V12.8.93" && exit\nexit 1\n')
        assembler.chmod(0o755)
        os.environ["TRITON_PTXAS_PATH"] = str(assembler)
        return compiled("sm_90", "float8_e4m3fn", num_stages=5)

def distinct_shapes(*shapes):
    problems = [Problem("rowwise-2d", NamedInts(M=M, K=K)) for M, K in shapes]
    return [list(problem.shape.values()) for problem in distinct("rowwise-2d", problems, "gfx942")]

found = {
    "sm_90": compiled("sm_90", "float8_e4m3fn"),
    "sm_90 fnuz": compiled("sm_90", "float8_e4m3fnuz"),
    "gfx942": compiled("gfx942", "float8_e4m3fnuz"),
    "gfx950": compiled("gfx950", "float8_e4m3fn"),
    "gfx90a": compiled("gfx90a", "float8_e4m3fnuz"),
    "waves": compiled("gfx942", "float8_e4m3fnuz", waves_per_eu=2),
    "refused": refused_by_the_assembler(),
    "distinct": distinct_shapes((640, 512), (64, 512), (256, 512), (64, 513)),
}
print(json.dumps(found))
"""


@pytest.mark.slow
def test_one_process_compiles_for_several_arches() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    distinct = found.pop("distinct")
    refused = found.pop("refused")
    assert refused["status"] == "compile_error"
    assert "ptxas" in refused["reason"]
    assert "reproducer" not in done.stdout + done.stderr  # Triton prints the whole program above that word
    assert {arch: result["status"] for arch, result in found.items()} == {
        "sm_90": "ok",
        "sm_90 fnuz": "compile_error",
        "gfx942": "ok",
        "gfx950": "ok",
        "gfx90a": "ok",
        "waves": "ok",
    }
    assert "\n" not in found["sm_90 fnuz"]["reason"]
    for arch in ("sm_90", "gfx942", "gfx950"):
        assert found[arch]["facts"]["registers"] > 0
        assert found[arch]["facts"]["spill_bytes"] == 0
    assert found["sm_90"]["facts"]["registers"] != found["gfx942"]["facts"]["registers"]
    code = {arch: result["facts"]["code"] for arch, result in found.items()}
    assert code["sm_90"] is None  # it is read only where asked for
    for arch in ("gfx942", "gfx950", "gfx90a"):
        assert 0 < code[arch]["resident_warps"] <= 32
    conversions = {arch: code[arch]["fp8_conversions"] for arch in ("gfx942", "gfx950", "gfx90a")}
    assert conversions["gfx942"] > 0
    assert conversions["gfx950"] > 0
    assert conversions["gfx90a"] == 0  # it has no such instruction
    assert distinct == [[64, 512], [64, 513]]  # of equal code the smallest grid; 16 divides no 513


def test_edges_are_compiled_once_for_each_code_that_they_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that 16 divides alike share a binary; other ones, and another alignment, have their own."""
    spec = load_spec("rowwise-2d")
    problem = Problem(spec.name, NamedInts(M=64, K=64))
    made = [
        Edge("same code", Problem(spec.name, NamedInts(M=3, K=64))),
        Edge("odd", Problem(spec.name, NamedInts(M=3, K=67))),
        Edge("odd too", Problem(spec.name, NamedInts(M=1, K=69))),
        Edge("unaligned", Problem(spec.name, NamedInts(M=3, K=64)), offset=1),
        Edge("aligned", Problem(spec.name, NamedInts(M=3, K=64)), offset=8),
    ]
    compiled: list[tuple[int, bool]] = []
    monkeypatch.setattr(compiling, "_compiled", set())
    monkeypatch.setattr(compiling, "load_spec", lambda reference: replace(spec, edges=lambda of: made, launch=launch))
    monkeypatch.setattr(compiling, "_recording", recording)

    def launch(config: NamedInts, given: tuple[Any, ...], out: tuple[Any, ...]) -> None:
        form = (given[0].shape[1] % 16 == 0, given[0].data_ptr() % 16 == 0)
        taken[-1].append(compiling.Launch(form, 1))
        if wanted[-1]:
            compiled.append(form)

    compiling.compile_edges("rowwise-2d", problem, spec.default, "sm_90")
    assert sorted(compiled) == [(False, True), (True, False)]
    compiling.compile_edges("rowwise-2d", problem, spec.default, "sm_90")
    assert len(compiled) == 2


taken: list[list[compiling.Launch]] = []
wanted: list[bool] = []


@contextlib.contextmanager
def recording(arch: str, compiles: bool = True) -> Iterator[list[compiling.Launch]]:
    taken.append([])
    wanted.append(compiles)
    yield taken[-1]


def test_a_tensors_alignment_is_part_of_what_code_is_specialized_on() -> None:
    spec = load_spec("rowwise-2d")
    aligned, unaligned = (
        edges.meta_inputs(spec, Edge("", Problem(spec.name, NamedInts(M=3, K=64)), offset=offset)) for offset in (0, 1)
    )
    assert [given[0].data_ptr() % 16 for given in (aligned, unaligned)] == [0, 2]
    assert unaligned[0].shape == aligned[0].shape
