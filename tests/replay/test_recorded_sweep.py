"""References, checks and notices when a recorded kernel is swept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import fp8tune
from database_rows import stored_results
from forked import workers_forked_from_here
from toy_recording import FOLDER, MODULE, Kernel, by_blocks, copies, floats, softmax, write, written

from fp8tune.records import NamedInts, Pick
from fp8tune.replay.loading import load_spec
from fp8tune.replay.recording import Launch, Scalar
from fp8tune.stats.study import Verdict
from fp8tune.store.results import Store
from fp8tune.studies import read_studies
from fp8tune.sweeping import picks


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=os.pathsep)
    yield
    load_spec.cache_clear()


def sweep(folder: Path, kernel: Kernel, *options: str) -> tuple[int, str]:
    """Return exit code and output."""
    write(folder, kernel)
    with workers_forked_from_here():
        output = fp8tune("sweep", "--recording", "run.json", "--db", "rows.db", *options, cwd=folder)
    return output.returncode, output.stdout + output.stderr


def test_a_reference_judges_in_float64_and_another_check_is_another_sweep(tmp_path: Path) -> None:
    again = "all results of this sweep were in the database"
    options = ("--tolerance", "1e-5,0", "--reference", f"{MODULE}:softmaxed")
    for expected in (False, True):
        code, output = sweep(tmp_path, softmax(16, 24), *options)
        assert (code, again in output) == (0, expected)
    with Store.open(str(tmp_path / "rows.db"), writable=False) as store:
        assert {result.check for result in stored_results(store)} == {"tolerance 1e-05 relative of float64"}
    assert again not in sweep(tmp_path, softmax(16, 24))[1]


@pytest.mark.parametrize(
    ("body", "code", "output"),
    [
        ("(x, n): return {'y': x / 2}", 1, "256 of 256 elements differ"),
        ("(x): raise RuntimeError('none\\nhere')", 2, "it raised RuntimeError: none here"),
        ("(x, nosuch): return x", 2, "it raised TypeError: reference() missing 1 required positional argument"),
        ("(x): return x[:1]", 2, "its y has the shape (1,), the kernel's (256,)"),
        ("(x): return {'nosuch': x}", 2, "it gives 'nosuch', the kernel writes y"),
        ("(x): return x, x", 2, "it gives 2 tensors, the kernel writes y"),
        ("(x): return x.double()", 2, "return that, or add --tolerance RTOL,ATOL"),
    ],
)
def test_a_reference_judges_exactly_or_is_refused_in_one_line(
    tmp_path: Path, body: str, code: int, output: str
) -> None:
    (tmp_path / "right.py").write_text(f"def reference{body}\n")
    options = ("--tolerance", "exact", "--reference", f"{tmp_path / 'right.py'}:reference")
    result, text = sweep(tmp_path, copies(), *options)
    assert (result, "Traceback" in text, output in (text if code == 1 else text.splitlines()[-1])) == (
        code,
        False,
        True,
    )
    with Store.open(str(tmp_path / "rows.db"), writable=False) as store:
        assert bool(store.pools()) == (code == 1)


def test_what_the_user_should_know_is_said(tmp_path: Path) -> None:
    """A stale recording, sizes that cannot be told, and a kernel of which there is no recording."""
    kernel = replace(softmax(stride=77), source_hash="0" * 16)
    output = sweep(tmp_path, kernel, "--timer", "simulated:1", "--quick")[1]
    assert f"{kernel.name} has changed since it was recorded" in output
    assert f"{kernel.name} is not checked on odd sizes: stride=77 is no size of a tensor" in output
    ended = fp8tune("sweep", "--kernel", kernel.name, "--db", "rows.db", cwd=tmp_path)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert f"run fp8tune record -o run.json -- python PROGRAM, and write {kernel.name}@run.json" in ended.stderr


def bare(*launches: tuple[int, int, int], table: tuple[int, ...] = (64, 128, 256, 512)) -> Kernel:
    """Return a recorded kernel without an autotuner: a launch for each size, block and number of warps."""
    made = []
    for n, block, warps in launches:
        arguments = (floats("x", n), written("y", n), Scalar("n", n), Scalar("B", block, True))
        made.append(Launch(arguments, by_blocks(n, *table), options={"num_warps": warps}))
    return Kernel(f"{MODULE}:copy", is_autotuned=False, launches=tuple(made))


def picks_of(folder: Path) -> dict[int, Pick]:
    with Store.open(str(folder / "rows.db"), writable=False) as store:
        return {pick.problem.shape["n"]: pick for pick in picks.read(store)}


def test_today_of_a_bare_kernel_is_what_each_launch_was_made_with(tmp_path: Path) -> None:
    """In the sweep's table, in show without the recording, and in the verdict, whose control is that config."""
    own = {1000: NamedInts(B=64, num_warps=1, num_stages=3), 4096: NamedInts(B=512, num_warps=8, num_stages=3)}
    kernel = bare((1000, 64, 1), (4096, 512, 8))
    options = ("--grid", "B=64,128,256,512", "--grid", "num_warps=1,2,4,8", "--timer", "simulated:1")
    code, output = sweep(tmp_path, kernel, *options)
    assert code == 0, output
    (tmp_path / "run.json").unlink()
    picks = picks_of(tmp_path)
    assert {n: (pick.today, pick.today_origin) for n, pick in picks.items()} == {n: (own[n], "program") for n in own}
    with Store.open(str(tmp_path / "rows.db"), writable=False) as store:
        studies = {study.problem.shape["n"]: study for study in read_studies(store)}
    for n, study in studies.items():
        times_us = study.times_us
        assert study.speedup == pytest.approx(times_us[own[n]] / times_us[study.pick.config], rel=0.01)
        assert [result.config for result in study.results if result.control] == [own[n]]
        assert (study.default, picks[n].speedup_ratio) == (own[n], study.speedup)


def test_only_the_config_of_each_launch_of_a_bare_kernel_is_timed_until_a_grid_is_named(tmp_path: Path) -> None:
    kernel, timer = bare((1000, 64, 1), (4096, 512, 8)), ("--timer", "simulated:1", "--quick")
    for grid, timed in (((), 1), (("--grid", "B=64,512", "--grid", "num_warps=1,8"), 4)):
        code, output = sweep(tmp_path, kernel, *grid, *timer)
        assert code == 0, output
        with Store.open(str(tmp_path / "rows.db"), writable=False) as store:
            assert [len(study.results) for study in read_studies(store)] == [timed] * 2
        if not grid:
            picks = picks_of(tmp_path).values()
            assert all((pick.today, pick.verdict) == (pick.config, Verdict.ALONE) for pick in picks)


def test_launches_that_share_a_config_and_were_made_with_several_have_none_of_today(tmp_path: Path) -> None:
    kernel, named = bare((1000, 64, 1), (1000, 512, 8)), f"{MODULE}:copy@run.json?shared=n"
    first, second = kernel.launches
    second = replace(second, arguments=(floats("x", 2000), *second.arguments[1:]))
    write(tmp_path, replace(kernel, launches=(first, second)))
    output = fp8tune("sweep", "--kernel", named, "--timer", "simulated:1", "--quick", "--db", "rows.db", cwd=tmp_path)
    assert output.returncode == 0, output.stderr
    with Store.open(str(tmp_path / "rows.db"), writable=False) as store:
        (pick,) = picks.read(store)
    assert (pick.today, pick.speedup_ratio) == (None, None)


def test_a_kernel_of_a_script_goes_by_its_path(tmp_path: Path) -> None:
    """Its module cannot be imported from here; the recording names the file."""
    path = FOLDER / f"{MODULE}.py"
    name = f"{path}:copied"
    options = ("--kernel", name, "--timer", "simulated:1", "--quick")
    code, output = sweep(tmp_path, replace(copies(), name=name, file=str(path)), *options)
    assert code == 0, output
    assert name in fp8tune("show", name, "--db", "rows.db", cwd=tmp_path).stdout
