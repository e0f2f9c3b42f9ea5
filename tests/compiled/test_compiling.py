"""Compiling for arches that are not here: the facts are each arch's own, whatever was compiled before."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fp8tune.measure import edges
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.spec import Edge, NamedInts, Problem

SCRIPT = r"""
import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from fp8tune.measure import compiling
from fp8tune.measure.compiling import alike, compile_config
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.spec import Edge, NamedInts, Problem

def compiled(arch, fp8_dtype, num_stages=1, **options):
    problem = Problem("rowwise-2d", NamedInts(M=64, K=512), fp8_dtype=fp8_dtype)
    config = NamedInts(BLOCK_SIZE=1, BLOCK_SIZE_ITER=1024, num_warps=4, num_stages=num_stages, **options)
    return asdict(compile_config("rowwise-2d", problem, config, arch, 200_000, is_run=arch == "sm_90"))

def refused_by_the_assembler():
    with tempfile.TemporaryDirectory() as folder:
        assembler = Path(folder) / "ptxas"
        assembler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "release 12.8, V12.8.93" && exit\nexit 1\n')
        assembler.chmod(0o755)
        os.environ["TRITON_PTXAS_PATH"] = str(assembler)
        return compiled("sm_90", "float8_e4m3fn", num_stages=5)

def distinct_shapes(*shapes):
    problems = [Problem("rowwise-2d", NamedInts(M=M, K=K)) for M, K in shapes]
    return [list(first.shape.values()) for first, *_ in alike("rowwise-2d", problems, "gfx942")]

def codes_of_edges():
    # Sizes that 16 divides alike share a binary; other ones, and another alignment, have their own.
    spec, (aligned, odd, odd_too) = load_spec("rowwise-2d"), (
        Problem("rowwise-2d", NamedInts(M=M, K=K)) for M, K in ((3, 64), (3, 67), (1, 69))
    )
    problems, offsets = (aligned, odd, odd_too, aligned, aligned), (0, 0, 0, 1, 8)
    edges = [Edge("", problem, offset=offset) for problem, offset in zip(problems, offsets)]
    compiling.load_spec, counts = lambda reference: replace(spec, edges=lambda problem: edges), []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for _ in range(2):
            compiling.compile_edges("rowwise-2d", aligned, spec.default, "gfx942")
            counts.append(len([*Path(folder).rglob("*.hsaco")]))
    return counts

results = {
    "sm_90": compiled("sm_90", "float8_e4m3fn"),
    "sm_90 fnuz": compiled("sm_90", "float8_e4m3fnuz"),
    "gfx942": compiled("gfx942", "float8_e4m3fnuz"),
    "gfx90a": compiled("gfx90a", "float8_e4m3fnuz", waves_per_eu=2),
    "refused": refused_by_the_assembler(),
    "distinct": distinct_shapes((640, 512), (64, 512), (256, 512), (64, 513)),
    "edges": codes_of_edges(),
}
print(json.dumps(results))
"""


@pytest.mark.slow
def test_one_process_compiles_for_several_arches() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    distinct = results.pop("distinct")
    refused = results.pop("refused")
    assert results.pop("edges") == [3, 3]
    assert refused["status"] == "compile_error"
    assert "ptxas" in refused["reason"]
    assert "reproducer" not in done.stdout + done.stderr  # Triton prints the whole program above that word
    assert {arch: result["status"] for arch, result in results.items()} == {
        "sm_90": "ok",
        "sm_90 fnuz": "compile_error",
        "gfx942": "ok",
        "gfx90a": "ok",
    }
    assert "\n" not in results["sm_90 fnuz"]["reason"]
    for arch in ("sm_90", "gfx942"):
        assert results[arch]["facts"]["registers"] > 0
        assert results[arch]["facts"]["spill_bytes"] == 0
    assert results["sm_90"]["facts"]["registers"] != results["gfx942"]["facts"]["registers"]
    code = {arch: result["facts"]["code"] for arch, result in results.items()}
    assert code["sm_90"] is None  # it is read only where asked for
    assert all(0 < code[arch]["resident_warps"] <= 32 for arch in ("gfx942", "gfx90a"))
    assert code["gfx942"]["fp8_conversions"] > 0
    assert code["gfx90a"]["fp8_conversions"] == 0  # it has no such instruction
    assert distinct == [[64, 512], [64, 513]]  # of equal code the smallest grid; 16 divides no 513


def test_a_tensors_alignment_is_part_of_what_code_is_specialized_on() -> None:
    spec = load_spec("rowwise-2d")
    aligned, unaligned = (
        edges.meta_inputs(spec, Edge("", Problem(spec.name, NamedInts(M=3, K=64)), offset=offset)) for offset in (0, 1)
    )
    assert [inputs[0].data_ptr() % 16 for inputs in (aligned, unaligned)] == [0, 2]
    assert unaligned[0].shape == aligned[0].shape
