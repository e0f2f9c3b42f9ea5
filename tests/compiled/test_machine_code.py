"""Machine code without a GPU: equal and different code by two compilers, each program compiled once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = r"""
import json
import os
from pathlib import Path
from fp8tune.measure.compiling import compile_config
from fp8tune.measure.programs import Wanted, compile_programs
from fp8tune_kernels.spec import NamedInts, Problem

def launch(M, K=512, warps=4, **options):
    problem = Problem("rowwise-2d", NamedInts(M=M, K=K), **options)
    config = NamedInts(BLOCK_SIZE=1, BLOCK_SIZE_ITER=1024, num_warps=warps, num_stages=1)
    return Wanted("rowwise-2d", problem, config)

wanted = {"small": launch(64), "large": launch(640), "odd": launch(64, 513), "warps": launch(64, warps=8),
          "refused": launch(64, fp8_dtype="float8_e4m3fnuz")}
calls = []
compiled = compile_programs([*wanted.values()] * 2, "sm_90", progress=lambda *counts: calls.append(counts))
small = wanted["small"]
alone = compile_config(small.reference, small.problem, small.config, "sm_90", 200_000).facts
print(json.dumps({
    "hashes": {name: compiled.hashes.get(item) for name, item in wanted.items()},
    "failures": [name for name, item in wanted.items() if item in compiled.failures],
    "alone": [alone.code_hash, alone.compiler == compiled.compiler],
    "compiler": vars(compiled.compiler),
    "programs": [compiled.programs, compiled.left],
    "files": len([*Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")]),
    "last": calls[-1],
    "stopped": compile_programs([launch(32)], "sm_90", is_over=lambda: True).left,
}))
"""


def by(cache: Path, **settings: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), **settings}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_compilers_agree_on_the_same_code_and_on_nothing_else(tmp_path: Path) -> None:
    first = by(tmp_path / "first")
    hashes = first["hashes"]
    assert hashes["small"] == hashes["large"]
    assert len({hashes[name] for name in ("small", "odd", "warps")}) == 3
    assert first["failures"] == ["refused"]
    assert first["alone"] == [hashes["small"], True]  # a sweep and a later compilation say the same
    assert first["programs"] == [3, 0]
    assert first["files"] == 3  # each once
    assert first["last"] == [5, 5]
    assert first["stopped"] == 1
    assert first["compiler"]["ptxas"].count(".") == 2
    unfused = by(tmp_path / "second", TRITON_DEFAULT_FP_FUSION="0")  # there is nothing to fuse
    assert unfused["hashes"] == hashes
    assert unfused["compiler"]["codegen"] == "fp_fusion=0"
    unoptimized = by(tmp_path / "third", DISABLE_PTXAS_OPT="1")
    assert unoptimized["compiler"]["codegen"] == "fp_fusion=1 DISABLE_PTXAS_OPT=1"
    assert all(unoptimized["hashes"][name] != hashes[name] for name in ("small", "odd", "warps"))
