"""The expert-parallel benchmark on two CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_all_contenders_are_compared_and_timed(tmp_path: Path) -> None:
    launch = [
        "tests.benchmarks.forking_ranks",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "benchmarks.expert_parallel",
    ]
    command = [sys.executable, "-m", *launch, "--layers=tiny", "--tokens=32", f"--out={tmp_path}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout
    assert "fp8tune, float32 sums: out equal, x equal, router " in printed
    rows = json.loads((tmp_path / "expert-parallel-2.json").read_text())
    assert {(row["layer"], row["ranks"], row["tokens"]) for row in rows} == {("tiny", 2, 32)}
    assert {"torch bf16", "fp8tune"} <= {row["contender"] for row in rows}
    assert all(row["median_ms"] > 0 < row["sent_bytes"] for row in rows)
