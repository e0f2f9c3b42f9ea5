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
from programs import KERNELS, QUICK, Recorded, quick_count, record

from fp8tune import cli
from fp8tune.replay.recording import Kernel, Recording, Scalar, Tensor, read, text_of

PYTHON = sys.executable

MAIN = """
import os, sys, triton, triton.language as tl, torch
import my_kernels

@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def in_main(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 0.0, mask=tl.arange(0, BLOCK) < n)

def make():
    @triton.autotune([triton.Config({"BLOCK": 64})], key=[])
    @triton.jit
    def closed(x_ptr, BLOCK: tl.constexpr):
        tl.store(x_ptr + tl.arange(0, BLOCK), 0.0)
    return closed

class Odd:
    pass

in_main[(1,)](torch.empty(64), 64)
make()[(1,)](torch.empty(64))
for _ in range(3):
    my_kernels.run_softmax(4, 64)
my_kernels.run_softmax(2, 128)
my_kernels.run_gather(100)
my_kernels.run_gather(100, float("inf"))
for _ in range(2):
    my_kernels.run_fill(100)
try:
    my_kernels.cached[(1,)](torch.empty(64), Odd())
except Exception:
    pass
print("the program's own output", sys.argv[1:])
sys.exit(3)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    (folder / "my_kernels.py").write_text(KERNELS)
    (folder / "train.py").write_text(MAIN)
    return folder


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    """A folder with a module whose kernel needs no torch."""
    (tmp_path / "mine.py").write_text(QUICK)
    return tmp_path


@pytest.fixture(scope="module")
def recorded(folder: Path) -> Recorded:
    """A script that launches all kinds of kernels and fails."""
    return record(folder, "--kernel", "*", program=(PYTHON, "train.py", "--lr", "3"))


@pytest.fixture(scope="module")
def kernels(recorded: Recorded) -> dict[str, Kernel]:
    assert recorded.recording is not None, recorded.stderr
    return {kernel.name.rpartition(":")[2]: kernel for kernel in recorded.recording.kernels}


def test_the_exit_code_and_the_output_are_the_programs(recorded: Recorded) -> None:
    assert recorded.returncode == 3, recorded.stderr
    assert "the program's own output ['--lr', '3']" in recorded.stdout
    assert "next: fp8tune sweep" in recorded.stdout


def test_launches_are_counted_by_everything_but_values(kernels: dict[str, Kernel]) -> None:
    softmax = kernels["softmax"]
    assert (softmax.name, softmax.key, len(softmax.source_hash)) == ("my_kernels:softmax", ("columns",), 16)
    assert [(launch.arguments[0].shape, launch.count) for launch in softmax.launches] == [((4, 64), 3), ((2, 128), 1)]
    assert [launch.key for launch in softmax.launches] == [(n, "torch.float32", "torch.float32") for n in (64, 128)]
    assert [config.kwargs["BLOCK"] for config in softmax.configs] == [64, 64, 128, 128]
    launch = softmax.launches[0]
    assert (launch.grid.axes, launch.grid.programs({"BLOCK": 64}), launch.config) == ((), (4,), softmax.configs[0])


def test_tensors_have_layout_values_and_whether_they_are_read_and_written(kernels: dict[str, Kernel]) -> None:
    (launch, infinite) = kernels["gather"].launches
    x, index, count = launch.arguments[:3]
    assert isinstance(x, Tensor)
    assert (x.dtype, x.shape, x.alignment, x.is_loaded, x.is_stored) == ("bfloat16", (100,), 8, True, True)
    assert (x.least, x.most, x.mean, x.deviation, x.zeros, x.not_finite) == (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    assert isinstance(index, Tensor)
    assert (index.integers, index.is_sorted, index.is_loaded, index.is_stored) == (tuple(range(100)), True, True, False)
    assert isinstance(count, Tensor)
    assert (count.values, count.is_loaded, count.is_stored) == ((0,), True, True)
    assert launch.arguments[3:] == (
        Scalar("n", 100),
        Scalar("scale", 2.0),
        Scalar("DTYPE", {"dtype": "tl.float32"}, is_constexpr=True),
        Scalar("FUNCTION", {"function": "my_kernels:twice"}, is_constexpr=True),
    )
    assert infinite.arguments[4] == Scalar("scale", {"float": "inf"})
    assert launch.grid.axes == ("BLOCK",)
    assert (launch.grid.programs({"BLOCK": 64}), launch.grid.programs({"BLOCK": 8})) == ((2,), (13,))


def test_bare_kernels_subclasses_and_unknown_arguments(kernels: dict[str, Kernel]) -> None:
    fill, cached = kernels["fill"], kernels["cached"]
    assert (fill.is_autotuned, fill.configs, "twice" in kernels) == (False, (), False)
    (launch,) = fill.launches
    assert (launch.count, launch.options) == (2, {"num_warps": 2})
    assert launch.arguments[2] == Scalar("BLOCK", 64, is_constexpr=True)
    assert ([launch.count for launch in cached.launches], len(cached.configs)) == ([2], 4)
    assert [reason.partition(",")[0] for reason in cached.skipped] == ["argument n is of type __main__.Odd"]


def test_kernels_that_cannot_be_imported_are_named_with_the_reason(kernels: dict[str, Kernel]) -> None:
    assert "defined in __main__" in kernels["in_main"].refusal
    assert "closure, made inside make" in kernels["make.<locals>.closed"].refusal
    assert not kernels["softmax"].refusal


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
    assert quick_count(ended) == 3
    assert ended.recording is not None
    assert ended.recording.processes == 3


def test_integers_are_left_out_where_the_user_says_so(folder: Path) -> None:
    program = (PYTHON, "-c", "import my_kernels; my_kernels.run_gather(100)")
    ended = record(folder, program=program, FP8TUNE_RECORD_VALUES="0")
    assert ended.recording is not None, ended.stderr
    index = ended.recording.kernels[0].launches[0].arguments[1]
    assert isinstance(index, Tensor)
    assert (index.integers, index.least, index.most) == (None, 0.0, 99.0)


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
