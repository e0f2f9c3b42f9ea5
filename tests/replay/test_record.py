"""Recorded programs: what their kernels got is in the file, whatever way the program runs and ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from command_line import fp8tune
from forked import Forked
from programs import QUICK, Recorded, record

from fp8tune import cli
from fp8tune.replay.recording import Kernel, Recording, read, text_of

PYTHON = sys.executable


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    """A folder with a module whose kernel needs no torch."""
    (tmp_path / "mine.py").write_text(QUICK)
    return tmp_path


def launches(recorded: Recorded) -> int:
    """Return how often the kernel of :data:`QUICK` was launched, all processes together."""
    assert recorded.recording is not None, recorded.stderr
    (kernel,) = recorded.recording.kernels
    assert kernel.name.endswith(":quick")
    return sum(launch.count for launch in kernel.launches)


def test_a_guarded_script_and_a_module_are_references_beside_the_users_own_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print(__file__)\n")
    (tmp_path / "mine.py").write_text(QUICK + '\nif __name__ == "__main__":\n    run(640)\n')
    for program, name in (((PYTHON, "mine.py"), "mine.py"), ((PYTHON, "-m", "mine"), "mine")):
        ended = record(tmp_path, program=program, PYTHONPATH=str(tmp_path / "own"))
        assert str(tmp_path / "own" / "sitecustomize.py") in ended.stdout
        assert ended.recording is not None, ended.stderr
        (kernel,) = ended.recording.kernels
        assert (kernel.name, kernel.refusal) == (f"{name}:quick", "")
        assert f"fp8tune sweep --kernel {name}:quick --recording" in ended.stdout


WITHOUT_FP8TUNE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("fp8tune", "fp8tune_kernels"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
"""


def test_a_program_whose_environment_lacks_fp8tune_is_recorded(quick: Path) -> None:
    (quick / "own").mkdir()
    (quick / "own" / "sitecustomize.py").write_text(WITHOUT_FP8TUNE)
    program = (PYTHON, "-c", "import mine; mine.run(640)")
    assert launches(record(quick, program=program, PYTHONPATH=str(quick / "own"))) == 1


def test_processes_are_merged_even_those_that_end_at_once(quick: Path) -> None:
    """Ranks by fork and by a new Python, two of which skip all clean-up."""
    (quick / "ranks.py").write_text(
        "import os, subprocess, sys, mine\n"
        "mine.run(64)\n"
        "if 'RANK' not in os.environ:\n"
        "    other = subprocess.Popen([sys.executable, 'ranks.py'], env={**os.environ, 'RANK': '1'})\n"
        "    if os.fork() == 0:\n"
        "        mine.run(64)\n"
        "        os._exit(0)\n"
        "    os.wait(), os.wait()\n"
        "else:\n"
        "    os._exit(0)\n"
    )
    ended = record(quick, program=(PYTHON, "ranks.py"))
    assert launches(ended) == 3
    assert ended.recording is not None
    assert ended.recording.processes == 3


def test_a_program_that_fails_without_a_gpu_is_told_of_the_interpreter(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("record", "-o", "run.json", "--", PYTHON, "-c", "import triton.runtime.autotuner; raise SystemExit(3)")
    monkeypatch.setattr("fp8tune.measure.device.probe", lambda: None)
    for interpreted in (False, True):
        with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"} if interpreted else {}, clear=False):
            if not interpreted:
                os.environ.pop("TRITON_INTERPRET", None)
            ended = fp8tune(*command, cwd=quick)
        assert ended.returncode == 3
        assert ("TRITON_INTERPRET=1" in ended.stderr) is not interpreted


@pytest.mark.parametrize(
    ("program", "code", "message"),
    [
        ((PYTHON, "-c", "print(1)"), 2, "no process imported Triton"),
        ((PYTHON, "-c", "import triton.runtime.autotuner"), 2, "launched no autotuned kernel"),
        (("./no-such-program",), 2, "cannot run './no-such-program'"),
        (("sh", "-c", "kill -9 $$"), 137, "was killed before its recording was first written"),
    ],
)
def test_a_program_that_launches_nothing_is_one_line_and_replaces_no_recording(
    tmp_path: Path, program: tuple[str, ...], code: int, message: str
) -> None:
    earlier = tmp_path / "run.json"
    earlier.write_text(text_of(Recording(kernels=(Kernel("module:kernel"),))))
    before = earlier.read_bytes()
    ended = fp8tune("record", "-o", earlier, "--", *program)
    assert (ended.returncode, ended.stderr.count("\n")) == (code, 1)
    assert message in ended.stderr
    assert earlier.read_bytes() == before


def test_a_file_that_is_no_recording_is_left_as_it_is(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("print('never run')\n")
    recorded = fp8tune("record", "-o", program, "--", PYTHON, program)
    assert recorded.returncode == 2
    assert "is not a recording, and stays as it is" in recorded.stderr
    assert program.read_text() == "print('never run')\n"


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_program_and_leaves_what_was_recorded(quick: Path, sent: signal.Signals, code: int) -> None:
    (quick / "long.py").write_text(
        "import mine, pathlib, time, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "mine.run(64)\npathlib.Path('started').touch()\ntime.sleep(60)\n"
    )

    def command() -> None:
        os.chdir(quick)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # no terminal, which signals all processes itself
        with mock.patch("sys.argv", ["fp8tune", "record", "-o", "ended.json", "--", PYTHON, "long.py"]):
            cli.main()

    running, started, deadline = Forked(command), quick / "started", time.monotonic() + 60
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(running.pid, sent)
    assert running.wait()[0] == code
    (kernel,) = read(quick / "ended.json").kernels
    assert kernel.launches[0].count == 1


COMPILED = """
import torch, mine

def launch(x):
    mine.fill[(1,)](x, x.numel())
    return x + 1

torch.compile(launch)(torch.empty(64))
"""
FILL = """
import triton, triton.language as tl

@triton.autotune([triton.Config({"B": 64})], key=["n"])
@triton.jit
def fill(x, n, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), 1.0, mask=tl.arange(0, B) < n)
"""


def test_a_program_that_torch_compile_fails_on_is_told_what_helps(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILL)
    failed = record(tmp_path, program=(PYTHON, "-c", COMPILED))
    assert failed.returncode != 0
    assert "TORCHDYNAMO_DISABLE=1" in failed.stderr
    fine = record(tmp_path, program=(PYTHON, "-c", COMPILED), TORCHDYNAMO_DISABLE="1")
    assert fine.recording is not None
    assert [len(kernel.launches) for kernel in fine.recording.kernels] == [1]
