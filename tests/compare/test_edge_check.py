"""What ``compare`` says of a fault that the problem it times hides: it checks each side on the edges of its kernels."""

from __future__ import annotations

import shutil
from pathlib import Path

import fp8tune_kernels
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.backends.processes import ProcessWorker
from fp8tune.measure.trees import Tree
from fp8tune.records import NamedInts, Outcome, Problem, Status

ROUND = Problem("mxfp8-dim1", NamedInts(M=128, K=64), scale_mode="floor")
CONFIG = NamedInts(BLOCK_SIZE_M=64, BLOCK_SIZE_K=64, num_warps=8, num_stages=1)
PARTIAL_BLOCK = ("(blocks < tl.cdiv(M, 32))", "(blocks < M // 32)")
"""The scales of the last, partial block of 32 rows are never written."""


def checkout(folder: Path, right: str = "", wrong: str = "") -> Tree:
    """A checkout of this package, with other words in the file of one kernel."""
    package = folder / "kernels" / "fp8tune_kernels"
    shutil.copytree(Path(fp8tune_kernels.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    file = package / "quantize" / "mxfp8_dim1.py"
    text = file.read_text()
    assert right in text
    file.write_text(text.replace(right, wrong) if right else text)
    return Tree(folder.name, folder, folder / "cache", ("kernels",))


def check(of: Tree, torch_device: str) -> Outcome:
    worker = ProcessWorker(torch_device, of)
    try:
        return worker.check(KernelArm(ROUND.kernel, ROUND, CONFIG, NamedInts(), 0))
    finally:
        worker.close()


def test_scales_of_a_partial_block_that_are_never_written_are_wrong(tmp_path: Path, device: str) -> None:
    assert check(checkout(tmp_path / "before"), device) == Outcome(Status.OK)
    found = check(checkout(tmp_path / "after", *PARTIAL_BLOCK), device)
    assert found.status is Status.WRONG
    assert found.reason.startswith("output 1: ")
    assert " on the edge '" in found.reason
