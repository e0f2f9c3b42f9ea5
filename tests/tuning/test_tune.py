"""``fp8tune tune``: from a program to the changed source file, on the simulated GPU and on Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Ended, fp8tune
from forked import ended

from fp8tune.cli.tune import offer
from fp8tune.exporting import read_for_format
from fp8tune.options import TuneOptions
from fp8tune.store.results import Store

KERNEL = '''"""A kernel with four configs, of which one is wrong if WRONG is set."""

import torch
import triton
import triton.language as tl

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=4) for block in (64, 128, 256, 512)]


@triton.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, x + WRONG, mask=at < n)
'''

PROGRAM = """
import torch
import ops

for n in (512, 700):
    x = torch.ones(n)
    y = torch.empty_like(x)
    ops.double[lambda config: (-(-n // config["BLOCK"]),)](x, y, n)
"""


def tune(folder: Path, *options: str) -> Ended:
    return ended("tune", *options, "--", sys.executable, "program.py", cwd=folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ops.py").write_text(KERNEL.replace("x + WRONG", "x + x"))
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def test_a_program_gets_its_diff_and_failing_with_the_picks_changes_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (folder / "ops.py").read_text()
    again = "import os\nif 'FP8TUNE_WINDOW_TABLES' in os.environ:\n    raise SystemExit(7)\n"
    (folder / "program.py").write_text(PROGRAM + again)
    done = tune(folder, "--timer", "simulated:1", "--apply")
    assert done.returncode == 7, done.stderr
    assert (folder / "ops.py").read_text() == before
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("ops:double")]
    assert "2 proven" in row or "open" in row
    written = fp8tune("export", "--for", "diff", "--kernel", "ops:double", "--arch", "simulated", cwd=folder)
    assert written.returncode == 0, written.stderr
    monkeypatch.chdir(folder)
    with Store.open("fp8tune.db") as store:
        picks = read_for_format(store, "simulated", ["ops:double"], allow_quick=False)
    offer(TuneOptions(command=(), output="tune.diff", apply=True), picks)
    assert (folder / "tune.diff").read_text() in written.stdout  # below a headline
    changed = (folder / "ops.py").read_text()
    assert changed.count("triton.Config(") < 4
    compile(changed, "ops.py", "exec")
    (folder / "ops.py").write_text(before)
    subprocess.run(["patch", "-p1", "-i", "tune.diff"], cwd=folder, check=True)
    assert (folder / "ops.py").read_text() == changed


def test_without_a_gpu_outputs_are_checked(folder: Path) -> None:
    (folder / "ops.py").write_text(KERNEL.replace("x + WRONG", "x + x + (BLOCK == 256)"))
    (folder / "program.py").write_text(PROGRAM.replace("(512, 700)", "(512,)"))
    done = tune(folder)
    assert "1.0" not in done.stdout
    assert "ops:double" in done.stdout
    assert "BLOCK=256" in done.stdout
    assert "fp8tune show ops:double --failed" in done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("program", "code", "problem"),
    [("print('no kernel')", 2, "no process imported Triton"), ("raise SystemExit(7)", 7, "exit code 7")],
)
def test_a_program_without_kernels_is_one_line(folder: Path, program: str, code: int, problem: str) -> None:
    (folder / "program.py").write_text(program)
    done = tune(folder, "--timer", "simulated:1")
    assert done.returncode == code, done.stderr
    assert problem in done.stderr.splitlines()[-1]
    assert not (folder / "run.json").exists()
