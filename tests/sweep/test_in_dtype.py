"""``sweep --shapes SET,dtype=``: problems of one input dtype alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import fp8tune as run


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_only_problems_of_the_dtype_are_swept(dtype: str, tmp_path: Path) -> None:
    arguments = ("sweep", "--kernel", "grouped-rows", "--timer", "simulated:1", "--quick", "--json")
    few = [f"--grid={axis}" for axis in ("BLOCK_SIZE_M=64", "BLOCK_SIZE_N=128", "DESCRIPTORS=0", "num_stages=2")]
    done = run(*arguments, *few, "--shapes", f"tiny,dtype={dtype}", "--db", str(tmp_path / "swept.db"))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["in_dtype"] for row in rows if "in_dtype" in row} == {dtype}


def test_a_dtype_that_a_kernel_does_not_take_is_refused(tmp_path: Path) -> None:
    done = run("sweep", "--shapes", "llama4,dtype=float16", "--kernel", "colwise", "--db", str(tmp_path / "swept.db"))
    assert done.returncode == 2
    assert done.stderr == "fp8tune: --shapes with dtype=float16: colwise takes bfloat16\n"
