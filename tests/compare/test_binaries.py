"""Hashes of launched code: variations of a kernel, each compiled for sm_90 by a worker of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from places import ROOT

PROGRAM = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from fp8tune.comparing.checkout import launched_code
from fp8tune.measure.trees import Tree, within
from fp8tune.measure.worker import Worker, usable_cores
from fp8tune.records import NamedInts, Problem

def code(name):
    folder, worker = Path(sys.argv[1], name), Worker()
    tree = Tree(name, folder, folder / "cache", ("kernels",))
    problem = Problem("rowwise-2d", NamedInts(M=300, K=512))
    config = NamedInts(BLOCK_SIZE=4 if name == "config" else 2, BLOCK_SIZE_ITER=1024, num_warps=4, num_stages=1)
    try:
        return worker.call(100, within, tree, launched_code, "rowwise-2d", problem, config, "sm_90")
    finally:
        worker.close()

with ThreadPoolExecutor(usable_cores()) as threads:
    print(json.dumps(dict(zip(sys.argv[2:], threads.map(code, sys.argv[2:])))))
"""
CHANGES = {
    "as it is": ("", ""),
    "comment": ("", "# in other words,\n# on two lines\n"),
    "config": ("", ""),
    "binary": ("largest = magnitude(x)\n", "largest = magnitude(x) * 2\n"),
    "grid": ("call.run(rowwise_2d_kernel, programs", "call.run(rowwise_2d_kernel, programs + 1"),
    "argument": ("ONE_PASS=width >= call.K)", "M=call.M - 1, ONE_PASS=width >= call.K)"),
    "torch operation": ("    call.run(", "    call.scales.zero_()\n    call.run("),
}


def test_code_changes_with_what_a_launch_does_and_not_with_a_comment(tmp_path: Path) -> None:
    for name, (old, new) in CHANGES.items():
        shutil.copytree(ROOT / "kernels", tmp_path / name / "kernels")
        file = tmp_path / name / "kernels" / "fp8tune_kernels" / "quantize" / "rowwise_2d.py"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1) if old else new + text)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *CHANGES]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment).stdout
    codes = dict(json.loads(output))
    assert codes.pop("comment") == codes["as it is"]
    assert len(set(codes.values())) == len(codes)
