"""References, checks and notices of a sweep of a recorded kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import toy_recording
from command_line import fp8tune
from database_rows import stored_results
from forked import workers_forked_from_here
from toy_recording import FOLDER

from fp8tune.replay.loading import load_spec
from fp8tune.replay.recording import Scalar
from fp8tune.store.results import Store


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=os.pathsep)
    yield
    load_spec.cache_clear()


def sweep(folder: Path, kernel: toy_recording.Kernel, *options: str) -> tuple[int, str]:
    toy_recording.write(folder, kernel)
    with workers_forked_from_here():
        output = fp8tune("sweep", "--recording", "run.json", "--db", "rows.db", *options, cwd=folder)
    return output.returncode, output.stdout + output.stderr


def test_a_reference_judges_in_float64_or_exactly(tmp_path: Path) -> None:
    options = ("--tolerance", "1e-5,0", "--reference", "toy_kernels:softmaxed")
    assert sweep(tmp_path, toy_recording.softmax(16, 24), *options)[0] == 0
    with Store.open(str(tmp_path / "rows.db"), writable=False) as store:
        assert {result.check for result in stored_results(store)} == {"tolerance 1e-05 relative of float64"}
    options = ("--tolerance", "exact", "--reference", "toy_kernels:halves")
    code, output = sweep(tmp_path, toy_recording.copies("hooked", 32), *options)
    assert (code, "32 of 32 elements differ" in output, "first config" in output) == (1, True, False)


@pytest.mark.parametrize(
    ("body", "output"),
    [
        ("(x): raise RuntimeError('none\\nhere')", "it raised RuntimeError: none here"),
        ("(x, nosuch): return x", "it raised TypeError: reference() missing 1 required positional argument"),
        ("(x): return x[:1]", "its y has the shape (1,), the kernel's (256,)"),
        ("(x): return {'nosuch': x}", "it gives 'nosuch', the kernel writes y"),
        ("(x): return x.double()", "return that, or add --tolerance RTOL,ATOL"),
    ],
)
def test_a_reference_that_cannot_be_used_is_one_line_and_leaves_no_row(tmp_path: Path, body: str, output: str) -> None:
    (tmp_path / "right.py").write_text(f"def reference{body}\n")
    options = ("--tolerance", "exact", "--reference", f"{tmp_path / 'right.py'}:reference")
    code, text = sweep(tmp_path, toy_recording.copies("hooked"), *options)
    assert (code, "Traceback" in text) == (2, False)
    assert output in text.splitlines()[-1]
    with Store.open(str(tmp_path / "rows.db"), writable=False) as store:
        assert not store.pools()


def test_a_check_of_the_users_is_another_sweep(tmp_path: Path) -> None:
    kernel = toy_recording.copies("hooked", 32)
    again = "all results of this sweep were in the database"
    assert again not in sweep(tmp_path, kernel)[1]
    assert again in sweep(tmp_path, kernel)[1]
    assert again not in sweep(tmp_path, kernel, "--tolerance", "0.1,0")[1]


def test_an_autotuner_without_a_recording_says_how_to_record(tmp_path: Path) -> None:
    output = fp8tune("sweep", "--kernel", "toy_kernels:softmax", "--db", "rows.db", cwd=tmp_path)
    assert (output.returncode, len(output.stderr.splitlines())) == (2, 1)
    assert "run fp8tune record -o run.json -- python PROGRAM, and add --recording run.json" in output.stderr


def test_a_stale_recording_and_sizes_that_cannot_be_told_are_named(tmp_path: Path) -> None:
    kernel = replace(toy_recording.softmax(), source_hash="0" * 16)
    (launch,) = kernel.launches
    kernel = replace(kernel, launches=(replace(launch, arguments=(*launch.arguments[:-1], Scalar("stride", 77))),))
    output = sweep(tmp_path, kernel, "--timer", "simulated:1", "--quick")[1]
    assert "toy_kernels:softmax has changed since it was recorded" in output
    assert "toy_kernels:softmax is not checked on odd sizes: stride=77 is no size of a tensor" in output


def test_a_kernel_of_a_script_goes_by_its_path(tmp_path: Path) -> None:
    """Its module cannot be imported from here; the recording names the file."""
    path = FOLDER / "toy_kernels.py"
    kernel = replace(toy_recording.copies("hooked", 32), name=f"{path}:hooked", file=str(path))
    toy_recording.write(tmp_path, kernel)
    options = ("--timer", "simulated:1", "--quick", "--db", "rows.db")
    output = fp8tune("sweep", "--recording", "run.json", "--kernel", f"{path}:hooked", *options, cwd=tmp_path)
    assert output.returncode == 0, output.stderr
    assert f"{path}:hooked" in fp8tune("show", "--kernel", f"{path}:hooked", "--db", "rows.db", cwd=tmp_path).stdout
