"""``fp8tune tune``: from a program to the changed source file, on the simulated GPU and on Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Ended, fp8tune
from forked import ended

from fp8tune.cli.tune import offer
from fp8tune.errors import UsageError
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


OTHER = """import lists
import triton
import triton.language as tl
from helpers import added


@triton.autotune(configs=lists.CONFIGS, key=["n"], reset_to_zero=["y_ptr"], pre_hook=lists.note)
@triton.jit
def twice(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, added(tl.load(x_ptr + at, mask=at < n)), mask=at < n)
"""
LISTS = """import triton

def note(arguments, reset_only=False):
    pass

CONFIGS = [triton.Config({"BLOCK": block}) for block in (64, 128, 256, 512)]
"""
HELPERS = "import triton\nimport triton.language as tl\n\n@triton.jit\ndef added(x):\n    return x + x\n"
EDITS: dict[str, tuple[str, str, str]] = {
    "body": ("ops.py", "x + x", "x * 3"),
    "constant of the body": ("ops.py", "x + x", "x + x * ONE"),
    "list": ("ops.py", "(64, 128, 256, 512)", "(64, 128, 1024)"),
    "key": ("ops.py", 'key=["n"]', 'key=["n", "BLOCK"]'),
    "heuristics": ("ops.py", "@triton.jit", '@triton.heuristics({"EVEN": lambda given: True})\n@triton.jit'),
    "kernel renamed": ("ops.py", "def double", "def doubled"),
    "two kernels of one name": ("ops.py", "@triton.autotune", "def double():\n    pass\n\n\n@triton.autotune"),
    "file replaced": ("ops.py", "", "double = None\n"),
    "file deleted": ("ops.py", "", ""),
    "helper in another module": ("helpers.py", "x + x", "x * 2"),
    "helper's module deleted": ("helpers.py", "", ""),
    "list in another module": ("lists.py", "(64, 128, 256, 512)", "(64, 128)"),
    "list from a third module": ("lists.py", "CONFIGS = [", "from elsewhere import CONFIGS\nOTHERS = ["),
    "pre_hook": ("lists.py", "    pass", "    print(arguments)"),
    "reset_to_zero": ("ops2.py", ', reset_to_zero=["y_ptr"]', ""),
}


EDIT = """
import os, pathlib
if "FP8TUNE_WINDOW_TABLES" in os.environ:
    file = pathlib.Path("ops.py")
    file.write_text(file.read_text().replace("256, 512)", "1024)"))
"""


@pytest.fixture(scope="module")
def tuned_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Two tuned kernels in two files, with a helper and a list in modules of their own.

    The program edits a list in its second run.
    """
    folder = tmp_path_factory.mktemp("tuned")
    texts = {
        "ops.py": KERNEL.replace("x + WRONG", "x + x"),
        **{"ops2.py": OTHER, "lists.py": LISTS, "helpers.py": HELPERS},
        "program.py": PROGRAM + "    import ops2\n    ops2.twice[lambda c: (-(-n // c['BLOCK']),)](x, y, n)\n" + EDIT,
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    done = tune(folder, "--timer", "simulated:1", "--apply")
    (folder / "ops.py.after").write_bytes((folder / "ops.py").read_bytes())
    (folder / "ops.py").write_text(texts["ops.py"])
    return folder, done


@pytest.fixture
def tuned(tuned_once: tuple[Path, Ended], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder with its files as they were swept."""
    folder, _ = tuned_once
    before = {path: path.read_bytes() for path in folder.glob("*.py")}
    monkeypatch.chdir(folder)
    yield folder
    for path, content in before.items():
        path.write_bytes(content)


def apply(*kernels: str, output: str | None = None) -> None:
    """Apply the diff of kernels as ``tune --apply`` does at its end."""
    with Store.open("fp8tune.db") as store:
        picks = [read_for_format(store, "simulated", [kernel], allow_quick=False)[0] for kernel in kernels]
    offer(TuneOptions(command=(), output=output, apply=True), picks)


@pytest.mark.parametrize(("file", "old", "new"), EDITS.values(), ids=EDITS)
def test_nothing_is_applied_to_a_kernel_or_a_list_that_was_not_swept(
    tuned: Path, file: str, old: str, new: str
) -> None:
    """Nor to the other files of the same diff, which is saved all the same."""
    path = tuned / file
    path.write_text(path.read_text().replace(old, new, 1) if old else new)
    if not old and not new:
        path.unlink()
    before = {place.name: place.read_bytes() for place in tuned.glob("*.py")}
    with pytest.raises(UsageError, match=r"no file is changed: .*run fp8tune tune again") as error:
        apply("ops:double", "ops2:twice", output="tune.diff")
    assert "\n" not in str(error.value)
    assert {place.name: place.read_bytes() for place in tuned.glob("*.py")} == before
    second = "ops2.py" if file == "ops.py" else "ops.py"
    assert f"+++ b/{second}" in (tuned / "tune.diff").read_text()


def test_comments_and_other_files_do_not_count(tuned: Path) -> None:
    for name in ("ops.py", "lists.py"):
        (tuned / name).write_text("# a comment\n" + (tuned / name).read_text() + "\nUNUSED = 1\n")
    apply("ops:double", "ops2:twice")
    assert all("configs=[\n" in (tuned / name).read_text() for name in ("ops.py", "ops2.py"))


def test_a_list_that_is_edited_while_it_is_tuned_stays(tuned_once: tuple[Path, Ended]) -> None:
    folder, done = tuned_once
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "ops.py has other configs, key or hooks of ops:double than were swept" in done.stderr.splitlines()[-1]
    assert (folder / "ops.py.after").read_text() == (folder / "ops.py").read_text().replace("256, 512)", "1024)")


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
