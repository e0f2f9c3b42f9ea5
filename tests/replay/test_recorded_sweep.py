"""A recorded kernel swept end to end on Triton's interpreter: what is honoured, and which faults are found."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import toy_recording
from command_line import fp8tune
from database_rows import stored_results
from forked import workers_forked_from_here
from places import PLANTED
from toy_recording import FOLDER

from fp8tune.records import Status
from fp8tune.replay.loading import load_spec
from fp8tune.replay.problems import problems
from fp8tune.replay.recording import Scalar
from fp8tune.store.read import subjects_of
from fp8tune.store.results import Store


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=os.pathsep)
    yield
    load_spec.cache_clear()


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Store]]:
    """Sweep all toy kernels; the output, and the rows."""
    folder = tmp_path_factory.mktemp("recorded")
    toy_recording.write(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")
        patched.setenv("PYTHONPATH", str(FOLDER), prepend=os.pathsep)
        patched.syspath_prepend(str(FOLDER))
        with workers_forked_from_here():
            output = fp8tune("sweep", "--recording", "run.json", "--db", "rows.db", cwd=folder)
    assert output.returncode == 0, output.stderr
    with Store.open(str(folder / "rows.db"), writable=False) as store:
        yield output.stderr, store


def outcomes(store: Store, attribute: str) -> dict[str, tuple[Status, str]]:
    """Config -> (status, reason) of a toy kernel's problems."""
    name = f"toy_kernels:{attribute}"
    tallies = [store.tally(subject) for subject in subjects_of(store.pools(name))]
    return {
        f"{config.get('BLOCK', config.get('ROWS'))}": (outcome.status, outcome.reason)
        for tally in tallies
        for config, outcome in tally.outcomes.items()
    }


@pytest.mark.parametrize("attribute", ["softmax", "double_in_place", "hooked", "keyed"])
def test_right_kernels_pass(swept: tuple[str, Store], attribute: str) -> None:
    results = outcomes(swept[1], attribute)
    assert len(results) == 2
    assert {status for status, _ in results.values()} == {Status.OK}


def test_what_is_reset_to_zero_is_zero_before_each_launch(swept: tuple[str, Store]) -> None:
    results = outcomes(swept[1], "accumulate")
    assert results["64"] == (Status.OK, "")
    assert "expected -7.9" in results["128"][1] or results["128"][0] is Status.OK  # sums in another order


def test_early_config_prune_is_the_kernels_own(swept: tuple[str, Store]) -> None:
    assert outcomes(swept[1], "pruned")["4096"] == (Status.PRUNED, "early_config_prune of the kernel")


def test_a_config_that_disagrees_with_the_first_is_found(swept: tuple[str, Store]) -> None:
    results = outcomes(swept[1], "wrong_block")
    assert [results[block][0] for block in ("64", "128", "256")] == [Status.OK, Status.WRONG, Status.OK]
    assert results["128"][1].startswith("output 0 disagrees with the first config: 256 of 256 elements differ")
    assert re.search(r"; fingerprint \d+$", results["128"][1])


def test_a_dropped_tail_is_found_at_odd_sizes(swept: tuple[str, Store]) -> None:
    status, reason = outcomes(swept[1], "drops_tail")["128"]
    assert status is Status.WRONG
    assert "on the edge 'odd sizes' (n=208)" in reason


def test_what_cannot_be_swept_is_named(swept: tuple[str, Store]) -> None:
    assert "__main__:local cannot be swept: it is defined in __main__" in swept[0]
    assert "routing" not in swept[0]
    assert "float8" not in swept[0]


def test_the_launch_of_each_problem_is_kept(swept: tuple[str, Store]) -> None:
    documents = swept[1].recorded_launches("toy_kernels:keyed")
    assert sorted(problem.in_dtype for problem in documents) == ["float16", "float32"]


def sweep(folder: Path, kernel: toy_recording.Kernel, *options: str) -> tuple[int, str]:
    toy_recording.write(folder, kernel)
    with workers_forked_from_here():
        output = fp8tune("sweep", "--recording", "run.json", "--db", "rows.db", *options, cwd=folder)
    return output.returncode, output.stdout + output.stderr


def test_a_reference_in_float64_judges_a_tolerance(tmp_path: Path) -> None:
    options = ("--tolerance", "1e-5,0", "--reference", "toy_kernels:softmaxed")
    assert sweep(tmp_path, toy_recording.softmax(16, 24), *options)[0] == 0
    with Store.open(str(tmp_path / "rows.db"), writable=False) as store:
        assert {result.check for result in stored_results(store)} == {"tolerance 1e-05 relative of float64"}


def test_a_reference_that_disagrees_leaves_no_right_config(tmp_path: Path) -> None:
    code, output = sweep(tmp_path, toy_recording.copies("hooked", 32), "--reference", "toy_kernels:halves")
    assert code == 1
    assert "32 of 32 elements differ" in output
    assert "first config" not in output


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
    code, text = sweep(tmp_path, toy_recording.copies("hooked"), "--reference", f"{tmp_path / 'right.py'}:reference")
    assert (code, "Traceback" in text) == (2, False)
    assert output in text.splitlines()[-1]
    with Store.open(str(tmp_path / "rows.db"), writable=False) as store:
        assert not store.pools()


def test_a_number_that_is_larger_than_any_size_is_no_size(tmp_path: Path) -> None:
    recorded = toy_recording.copies("hooked")
    launch = recorded.launches[0]
    large = replace(launch, arguments=(*launch.arguments, Scalar("seed", 2**40)))
    (shape,) = [problem.shape for problem in problems(replace(recorded, launches=(large,)))]
    assert dict(shape) == {"n": 256}


def test_a_check_of_the_users_is_another_sweep(tmp_path: Path) -> None:
    kernel = toy_recording.copies("hooked", 32)
    again = "all results of this sweep were in the database"
    assert again not in sweep(tmp_path, kernel)[1]
    assert again in sweep(tmp_path, kernel)[1]
    assert again not in sweep(tmp_path, kernel, "--tolerance", "0.1,0")[1]


def test_an_autotuner_without_a_recording_says_how_to_record(tmp_path: Path) -> None:
    output = fp8tune("sweep", "--kernel", "toy_kernels:softmax", "--db", "rows.db", cwd=tmp_path)
    assert output.returncode == 2
    assert "run fp8tune record -o run.json -- python PROGRAM, and add --recording run.json" in output.stderr
    assert len(output.stderr.splitlines()) == 1


def test_a_stale_recording_is_said_to_be(tmp_path: Path) -> None:
    output = sweep(tmp_path, replace(toy_recording.copies("hooked", 32), source_hash="0" * 16))[1]
    assert "toy_kernels:hooked has changed since it was recorded" in output


def test_sizes_that_cannot_be_told_are_named(tmp_path: Path) -> None:
    kernel = toy_recording.softmax()
    (launch,) = kernel.launches
    kernel = replace(kernel, launches=(replace(launch, arguments=(*launch.arguments[:-1], Scalar("stride", 77))),))
    assert (
        "toy_kernels:softmax is not checked on odd sizes: stride=77 is no size of a tensor"
        in sweep(tmp_path, kernel, "--timer", "simulated:1", "--quick")[1]
    )


def test_the_users_check_takes_the_place_of_a_specs_own(tmp_path: Path) -> None:
    kernel = f"{PLANTED / 'versioned.py'}:SPEC?check=tolerance&relative=0.1"
    options = ("--timer", "simulated:1", "--quick", "--shapes", "tiny", "--db", "rows.db")
    output = fp8tune("sweep", "--kernel", kernel, *options, cwd=tmp_path)
    assert output.returncode == 0
    assert "versioned is checked by tolerance 1e-01 relative of float64, not by its own exact" in output.stderr


def test_a_kernel_of_a_script_goes_by_its_path(tmp_path: Path) -> None:
    """Its module cannot be imported from here; the recording names the file."""
    path = FOLDER / "toy_kernels.py"
    kernel = replace(toy_recording.copies("hooked", 32), name=f"{path}:hooked", file=str(path))
    toy_recording.write(tmp_path, kernel)
    options = ("--timer", "simulated:1", "--quick", "--db", "rows.db")
    output = fp8tune("sweep", "--recording", "run.json", "--kernel", f"{path}:hooked", *options, cwd=tmp_path)
    assert output.returncode == 0, output.stderr
    assert f"{path}:hooked" in fp8tune("show", "--kernel", f"{path}:hooked", "--db", "rows.db", cwd=tmp_path).stdout
