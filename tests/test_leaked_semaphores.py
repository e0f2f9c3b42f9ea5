"""A sweep that is told to end warns of no semaphores that its kernels' imports made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from command_line import environment
from places import PLANTED

LOCK = "import multiprocessing\nLOCK = multiprocessing.get_context('spawn').Lock()\nSPEC = "


def test_semaphores_of_killed_workers_are_removed_without_a_warning(tmp_path: Path) -> None:
    """Create semaphores as tqdm and data loaders do: Python's resource tracker warned of 5 leaked ones."""
    text = (PLANTED / "faults.py").read_text().replace("\nSPEC = ", f"\n{LOCK}", 1)
    (tmp_path / "locked.py").write_text(text)
    (tmp_path / "one.toml").write_text("[[rows]]\nM = 40\nK = 24\nN = 8\nE = 2\n")
    command = [sys.executable, "-m", "fp8tune", "sweep", "--kernel", "locked.py:SPEC", "--shapes", "one.toml"]
    command += ["--grid", "FAULT=0,5", "--db", "results.db", "--format", "json"]  # 5 never ends
    process = subprocess.Popen(
        command, env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    before = {path.name for path in Path("/dev/shm").glob("sem.mp-*")}
    os.kill(process.pid, signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143, error
    assert "stopped by SIGTERM" in error
    assert "leaked" not in error
    assert before
