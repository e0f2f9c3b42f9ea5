"""``sweep --shapes SET,dtype=NAME``: sizes of one input dtype alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import fp8tune as run

from fp8tune.store.results import Store


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_only_problems_of_the_dtype_are_swept(dtype: str, tmp_path: Path) -> None:
    arguments = ("sweep", "--kernel", "grouped-rows", "--shapes", f"tiny,dtype={dtype}", "--timer", "simulated:1")
    few = [f"--grid={axis}" for axis in ("BLOCK_SIZE_M=64", "BLOCK_SIZE_N=128", "DESCRIPTORS=0", "num_stages=2")]
    done = run(*arguments, *few, "--quick", "--db", tmp_path / "swept.db")
    assert done.returncode == 0, done.stderr
    with Store.open(str(tmp_path / "swept.db"), writable=False) as store:
        assert {row.problem.in_dtype for row in store.rows()} == {dtype}


def test_a_dtype_that_a_kernel_does_not_take_is_refused(tmp_path: Path) -> None:
    done = run("sweep", "--shapes", "tiny,dtype=float16", "--kernel", "colwise", "--db", tmp_path / "swept.db")
    assert done.returncode == 2
    assert "float16" in done.stderr
