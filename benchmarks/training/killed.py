"""Kill a comparison with SIGKILL while it trains, begin it again, and compare with one that nobody killed.

    python -m benchmarks.training.killed                         # on a GPU: all arms, 500 steps
    python -m benchmarks.training.killed --size tiny --arms fp8  # on a CPU

Every process of the command is killed at once, as by a machine that goes away, after each run has saved a state.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.training.arms import ARMS

LIMIT_S = 300.0
"""Until every run has saved a state."""

COMPARED = ("losses", "held_out", "digest")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where the bits are the same, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--size", default="small")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--save-every", type=int, default=20)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder, "whole"), Path(folder, "killed")
        subprocess.run(_command(whole, options), check=True)
        states = [killed / f"{arm}-0.pt" for arm in options.arms]
        _kill_when_there(_command(killed, options), states)
        left = sorted(path.name for path in killed.iterdir())
        print(f"killed; left: {', '.join(left)}", flush=True)
        subprocess.run(_command(killed, options), check=True)
        are_same = True
        for arm in options.arms:
            wanted, found = (_result(path, arm) for path in (whole, killed))
            same = [wanted[name] == found[name] for name in COMPARED]
            are_same &= all(same) and found["resumed_at"] > 0
            said = ", ".join(
                f"{name} {'same' if is_same else 'other'}" for name, is_same in zip(COMPARED, same, strict=True)
            )
            print(f"{arm}: went on at step {found['resumed_at']} of {options.steps}: {said}", flush=True)
    return 0 if are_same else 1


def _command(folder: Path, options: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.training", "--seeds", "1", "--no-times", "--size", options.size]
    command += ["--arms", *options.arms, "--processes", str(len(options.arms)), "--steps", str(options.steps)]
    return [*command, "--save-every", str(options.save_every), "--folder", str(folder), "--json", f"{folder}.json"]


def _kill_when_there(command: Sequence[str], files: Sequence[Path]) -> None:
    """Run the command in a group of its own, and kill the group when it has written all of these files."""
    process = subprocess.Popen(command, start_new_session=True)
    end = time.monotonic() + LIMIT_S
    while not all(file.exists() for file in files):
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError("no state was saved: give more --steps, or a smaller --save-every")
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _result(folder: Path, arm: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{arm}-0.json").read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
