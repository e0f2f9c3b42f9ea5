"""Compiling without a GPU: facts of each arch, and hashes of machine code by which two compilers agree or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from fp8tune.measure import edges
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.spec import Edge, NamedInts, Problem

SCRIPT = r"""
import json
import multiprocessing
import os
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from fp8tune.measure import compiling, forked, trial  # the last two here once, not in each process
from fp8tune.measure.compiling import alike, compile_config
from fp8tune.measure.programs import Wanted, compile_programs
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.spec import Edge, NamedInts, Problem

def launch(M, K=512, warps=4, stages=1, fp8_dtype="float8_e4m3fn", **options):
    problem = Problem("rowwise-2d", NamedInts(M=M, K=K), fp8_dtype=fp8_dtype)
    config = NamedInts(BLOCK_SIZE=1, BLOCK_SIZE_ITER=1024, num_warps=warps, num_stages=stages, **options)
    return Wanted("rowwise-2d", problem, config)

wanted = {"small": launch(64), "large": launch(640), "odd": launch(64, 513), "warps": launch(64, warps=8),
          "refused": launch(64, fp8_dtype="float8_e4m3fnuz")}

def compiled_with(variable, value):
    os.environ[variable] = value
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        done = {name: compile_config(item.reference, item.problem, item.config, "sm_90", 200_000).facts
                for name, item in wanted.items() if name != "refused"}
        files = len([*Path(folder).rglob("*.cubin")])
    codegen, = {facts.compiler.codegen for facts in done.values()}
    return {"hashes": {name: facts.code_hash for name, facts in done.items()}, "codegen": codegen, "files": files}

# in processes that have compiled nothing: Triton looks at no variable again where it has a kernel
load_spec("rowwise-2d")
with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    unfused = pool.apply(compiled_with, ("TRITON_DEFAULT_FP_FUSION", "0"))
    unoptimized = pool.apply(compiled_with, ("DISABLE_PTXAS_OPT", "1"))
calls = []
programs = compile_programs([*wanted.values()] * 2, "sm_90", progress=lambda *counts: calls.append(counts))
results = {
    "hashes": {name: programs.hashes.get(item) for name, item in wanted.items()},
    "failures": [name for name, item in wanted.items() if item in programs.failures],
    "compiler": vars(programs.compiler),
    "programs": [programs.programs, programs.left],
    "files": len([*Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")]),
    "last": calls[-1],
    "stopped": compile_programs([launch(32)], "sm_90", is_over=lambda: True).left,
    "unfused": unfused,
    "unoptimized": unoptimized,
}

def compiled(arch, fp8_dtype, stages=1, **options):
    item = launch(64, stages=stages, fp8_dtype=fp8_dtype, **options)
    return asdict(compile_config("rowwise-2d", item.problem, item.config, arch, 200_000, is_run=arch == "sm_90"))

def refused_by_the_assembler():
    with tempfile.TemporaryDirectory() as folder:
        assembler = Path(folder) / "ptxas"
        assembler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "release 12.8, V12.8.93" && exit\nexit 1\n')
        assembler.chmod(0o755)
        os.environ |= dict.fromkeys(("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"), str(assembler))
        return compiled("sm_90", "float8_e4m3fn", stages=5)

def codes_of_edges():
    # Sizes that 16 divides alike share a binary; other ones, and another alignment, have their own.
    spec = load_spec("rowwise-2d")
    aligned, odd, odd_too = (Problem("rowwise-2d", NamedInts(M=M, K=K)) for M, K in ((3, 64), (3, 67), (1, 69)))
    offsets = [(aligned, 0), (odd, 0), (odd_too, 0), (aligned, 1), (aligned, 8)]
    edges = [Edge("", problem, offset=offset) for problem, offset in offsets]
    compiling.load_spec, counts = lambda reference: replace(spec, edges=lambda problem: edges), []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for _ in range(2):
            compiling.compile_edges("rowwise-2d", aligned, spec.default, "gfx942")
            counts.append(len([*Path(folder).rglob("*.hsaco")]))
    return counts

shapes = [Problem("rowwise-2d", NamedInts(M=M, K=K)) for M, K in ((640, 512), (64, 512), (256, 512), (64, 513))]
small = wanted["small"]
alone = compile_config(small.reference, small.problem, small.config, "sm_90", 200_000).facts
results |= {
    "alone": [alone.code_hash, alone.compiler == programs.compiler],
    "arches": {
        "sm_90": compiled("sm_90", "float8_e4m3fn"),
        "sm_90 fnuz": compiled("sm_90", "float8_e4m3fnuz"),
        "gfx942": compiled("gfx942", "float8_e4m3fnuz"),
        "gfx90a": compiled("gfx90a", "float8_e4m3fnuz", waves_per_eu=2),
        "refused": refused_by_the_assembler(),
    },
    "distinct": [list(first.shape.values()) for first, *_ in alike("rowwise-2d", shapes, "gfx942")],
    "edges": codes_of_edges(),
}
"""


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All that one process and those forked from it compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("first"))
    command = [sys.executable, "-c", f"{SCRIPT}\nprint(json.dumps(results))"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "reproducer" not in done.stdout + done.stderr  # Triton prints the whole program above that word
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_one_process_compiles_for_several_arches(first: dict[str, Any]) -> None:
    arches = first["arches"]
    assert first["edges"] == [3, 3]
    assert "ptxas" in arches["refused"]["reason"]
    statuses = {
        "sm_90": "ok",
        "sm_90 fnuz": "compile_error",
        "gfx942": "ok",
        "gfx90a": "ok",
        "refused": "compile_error",
    }
    assert {arch: result["status"] for arch, result in arches.items()} == statuses
    assert "\n" not in arches["sm_90 fnuz"]["reason"]
    registers = [arches[arch]["facts"]["registers"] for arch in ("sm_90", "gfx942")]
    assert min(registers) > 0
    assert registers[0] != registers[1]
    assert [arches[arch]["facts"]["spill_bytes"] for arch in ("sm_90", "gfx942")] == [0, 0]
    assert first["distinct"] == [[64, 512], [64, 513]]  # of equal code the smallest grid; 16 divides no 513


@pytest.mark.slow
def test_compilers_agree_on_the_same_code_and_on_nothing_else(first: dict[str, Any]) -> None:
    hashes = first["hashes"]
    assert hashes["small"] == hashes["large"]
    assert len({hashes[name] for name in ("small", "odd", "warps")}) == 3
    assert first["failures"] == ["refused"]
    assert first["alone"] == [hashes["small"], True]  # a sweep and a later compilation say the same
    assert (first["programs"], first["files"], first["last"], first["stopped"]) == ([3, 0], 3, [5, 5], 1)  # each once
    assert first["compiler"]["ptxas"].count(".") == 2
    successes = {name: code for name, code in hashes.items() if name != "refused"}
    unfused, unoptimized = first["unfused"], first["unoptimized"]
    assert unfused == {"hashes": successes, "codegen": "fp_fusion=0", "files": 3}  # there is nothing to fuse
    assert (unoptimized["codegen"], unoptimized["files"]) == ("fp_fusion=1 DISABLE_PTXAS_OPT=1", 3)
    assert all(unoptimized["hashes"][name] != code for name, code in successes.items())


def test_a_tensors_alignment_is_part_of_what_code_is_specialized_on() -> None:
    spec = load_spec("rowwise-2d")
    aligned, unaligned = (
        edges.meta_inputs(spec, Edge("", Problem(spec.name, NamedInts(M=3, K=64)), offset=offset)) for offset in (0, 1)
    )
    assert [inputs[0].data_ptr() % 16 for inputs in (aligned, unaligned)] == [0, 2]
    assert unaligned[0].shape == aligned[0].shape
