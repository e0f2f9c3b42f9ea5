"""Two revisions of planted kernels in a real repository, compared on planted rows."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from database_rows import merged, study_of
from git_repositories import commit, git

from fp8tune import errors
from fp8tune.comparing import recorded
from fp8tune.comparing.comparison import ComparedRow, Comparison
from fp8tune.comparing.sides import sides
from fp8tune.records import Device, FinalsRun, KernelVersion, Kind, NamedInts, Problem, ProcessTimes, Status
from fp8tune.render import contracts
from fp8tune.revisions import source
from fp8tune.stats.study import Study

KERNEL = """
SCALE = {scale}
def launch(config, inputs, outputs):
    return SCALE
SPEC = KernelSpec(name="{name}", launch=launch, outputs=launch)
"""
H100 = Device("sm_90", "NVIDIA H100", "1" * 16, 132, "580.95", "cuda 13.0", "2.11.0", "3.6.0")
SHAPE = NamedInts(M=16640, K=5120, G=64)
CONFIG = NamedInts(BLOCK_SIZE=32, num_warps=4)


def file_of(kernel: str) -> str:
    return f"kernels/fp8tune_kernels/quantize/{kernel.replace('-', '_')}.py"


def files(**scales: int) -> dict[str, str | None]:
    """The files of kernels with these scales."""
    names = {name.replace("_", "-"): scale for name, scale in scales.items()}
    return {file_of(name): KERNEL.format(scale=scale, name=name) for name, scale in names.items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """colwise changes between main and branch, rowwise-2d does not, rowwise is new, mxfp8-dim0 goes."""
    folder = tmp_path_factory.mktemp("made")
    git(folder, "init", "-q", "-b", "main")
    commit(folder, files(colwise=1, rowwise_2d=1, mxfp8_dim0=1))
    git(folder, "checkout", "-q", "-b", "branch")
    commit(folder, files(colwise=2, rowwise=1) | {file_of("mxfp8-dim0"): None})
    return folder


@pytest.fixture
def repository(made: Path, tmp_path: Path) -> Path:
    """A copy, to change."""
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True)


def rows(
    repository: Path,
    revision: str,
    kernel: str,
    *times_us: float,
    device: Device = H100,
    config: NamedInts = CONFIG,
) -> Study:
    """What a finished sweep of the kernel at a revision would have stored."""
    found = source.source_hash(kernel, source.at_commit(repository, revision))
    run = FinalsRun("a sweep", tie_band=0.01, keep_band=0.015)
    finals = tuple(ProcessTimes(run, f"final {n:02d}", ((0, time_us),)) for n, time_us in enumerate(times_us))
    return study_of(
        Problem(kernel, SHAPE, routing="jagged"),
        config,
        device,
        Kind.MEASURED,
        Status.OK,
        times_us=times_us,
        finals=finals if len(times_us) > 1 else (),
        version=KernelVersion(kernel, found, default=CONFIG, axes=(("BLOCK_SIZE", (32,)), ("num_warps", (4,)))),
    )


def compare(evidence: Sequence[Study], repository: Path, range_text: str, kernels: Sequence[str] = ()) -> Comparison:
    return recorded.compare(merged(evidence), sides(repository, range_text, kernels))


def compared(repository: Path, *evidence: Study, range_text: str = "main..branch") -> dict[str, ComparedRow]:
    comparison = compare(evidence, repository, range_text)
    assert len({row.kernel for row in comparison.rows}) == len(comparison.rows)
    return {row.kernel: row for row in comparison.rows}


def test_changed_code_is_paired_by_its_source_hash(repository: Path) -> None:
    evidence = [rows(repository, "main", "colwise", 200.0), rows(repository, "branch", "colwise", 150.0)]
    row = compared(repository, *evidence)["colwise"]
    assert (row.arch, row.shape, row.before_us, row.after_us) == ("sm_90", SHAPE, 200.0, 150.0)
    assert row.ratio == 0.75


def test_recorded_rows_end_in_the_same_verdicts(repository: Path) -> None:
    """Four processes a side: enough to tell 25 % from the noise, and 0.1 % from 2 %."""
    spread = (0.998, 0.999, 1.001, 1.002)
    before = rows(repository, "main", "colwise", *(200.0 * x for x in spread))
    for factor, verdict in ((0.75, "IMPROVEMENT"), (1.001, "CLEAR"), (1.25, "REGRESSION")):
        times_us = tuple(200.0 * factor * x for x in spread)
        after = rows(repository, "branch", "colwise", *times_us)
        comparison = compare([before, after], repository, "main..branch", ["colwise"])
        (row,) = comparison.rows
        assert (row.verdict, row.n) == (verdict, 4)
        assert row.effect is not None
        assert row.effect.interval[0] < factor < row.effect.interval[1]
        assert comparison.exit_code == (1 if verdict == "REGRESSION" else 0)


def test_one_process_a_side_is_inconclusive_and_says_so(repository: Path) -> None:
    evidence = [rows(repository, "main", "colwise", 200.0), rows(repository, "branch", "colwise", 150.0)]
    comparison = compare(evidence, repository, "main..branch", ["colwise"])
    assert [row.verdict for row in comparison.rows] == ["INCONCLUSIVE"]
    assert comparison.exit_code == 3
    assert any("one process a side" in line for line in comparison.notices)


def test_an_unrelated_commit_orphans_no_rows(repository: Path) -> None:
    evidence = [rows(repository, "main", "colwise", 200.0), rows(repository, "branch", "colwise", 150.0)]
    file = repository / file_of("colwise")
    file.write_text(file.read_text().replace("SCALE =", "# why\nSCALE ="))
    commit(repository, {"README.md": "hello"})
    assert compared(repository, *evidence)["colwise"].after_us == 150.0


def test_each_side_has_its_own_best_config(repository: Path) -> None:
    slow, fast = rows(repository, "main", "colwise", 200.0), rows(repository, "branch", "colwise", 150.0)
    other = NamedInts(BLOCK_SIZE=64, num_warps=4)
    evidence = [
        slow,
        rows(repository, "main", "colwise", 180.0, config=other),
        fast,
        rows(repository, "branch", "colwise", 190.0, config=other),
    ]
    row = compared(repository, *evidence)["colwise"]
    assert (row.before_us, row.after_us) == (180.0, 150.0)


def test_the_verdict_words(repository: Path) -> None:
    evidence = [
        rows(repository, "main", "colwise", 200.0),
        rows(repository, "main", "rowwise-2d", 90.0),
        rows(repository, "branch", "rowwise", 80.0),
        rows(repository, "main", "mxfp8-dim0", 70.0),
    ]
    found = compared(repository, *evidence)
    assert {kernel: row.verdict for kernel, row in found.items()} == {
        "rowwise-2d": "SAME-CODE",
        "colwise": "no rows",
        "rowwise": "NEW",
        "mxfp8-dim0": "REMOVED",
    }
    assert found["rowwise-2d"].ratio == 1.0
    assert (found["rowwise"].before_us, found["rowwise"].after_us) == (None, 80.0)
    assert (found["mxfp8-dim0"].before_us, found["mxfp8-dim0"].after_us) == (70.0, None)
    assert "run fp8tune sweep there" in found["colwise"].reason


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"driver": "570.1"}, "driver 580.95 against 570.1"),
        ({"triton": "3.7.1"}, "triton 3.6.0 against 3.7.1"),
        ({"name": "NVIDIA H200", "uuid_hash": "2" * 16}, "name NVIDIA H100 against NVIDIA H200"),
    ],
)
def test_unlike_devices_and_versions_are_never_paired(repository: Path, change: dict[str, str], says: str) -> None:
    elsewhere = rows(repository, "branch", "colwise", 150.0, device=replace(H100, **change))
    comparison = compare(
        [rows(repository, "main", "colwise", 200.0), elsewhere], repository, "main..branch", ["colwise"]
    )
    assert [row.verdict for row in comparison.rows] == ["no rows", "no rows"]
    assert any("never paired" in row.reason and says in row.reason for row in comparison.rows)
    assert comparison.exit_code == 3
    assert any(says in line for line in comparison.notices)


@pytest.mark.parametrize("kind", [Kind.INTERPRETER, Kind.STATIC, Kind.PUBLISHED])
def test_rows_that_time_nothing_of_ours_do_not_count(repository: Path, kind: Kind) -> None:
    evidence = [replace(rows(repository, side, "colwise", 1.0), kind=kind) for side in ("main", "branch")]
    row = compared(repository, *evidence)["colwise"]
    assert (row.verdict, row.before_us, row.problem) == ("no rows", None, None)


def test_the_geometric_mean_is_over_changed_code(repository: Path) -> None:
    changed = [rows(repository, "main", "colwise", 100.0), rows(repository, "branch", "colwise", 25.0)]
    shape = NamedInts(M=1, K=1, G=1)
    sides = [rows(repository, side, "colwise", 50.0) for side in ("main", "branch")]
    slower = [replace(study, problem=replace(study.problem, shape=shape)) for study in sides]
    same = rows(repository, "main", "rowwise-2d", 90.0)
    assert compare([*changed, *slower, same], repository, "main..branch").geomean == pytest.approx(0.5)
    assert compare([same], repository, "main..branch").geomean == 1.0
    assert compare([same], repository, "main..branch", ["colwise"]).geomean is None


def test_three_dots_start_at_the_merge_base(repository: Path) -> None:
    evidence = [rows(repository, "main", "colwise", 200.0), rows(repository, "branch", "colwise", 150.0)]
    git(repository, "checkout", "-q", "main")
    commit(repository, files(colwise=3))
    assert compared(repository, *evidence, range_text="main..branch")["colwise"].verdict == "no rows"
    assert compared(repository, *evidence, range_text="main...branch")["colwise"].ratio == 0.75


@pytest.mark.parametrize("text", ["main", "main..", "..branch", "a..b..c", "a....b", "..", "", "main branch"])
def test_a_malformed_range_is_one_line(repository: Path, text: str) -> None:
    with pytest.raises(errors.UsageError, match="no range of revisions"):
        compare([], repository, text)


HOSTILE = (
    *("--help", "-h", "--output=made", "--upload-pack=touch made", "--exec=touch made", "-c core.pager=touch", "--all"),
    *("$(touch made)", "`touch made`", ";touch made", "main;touch made", "main|touch made", "main&touch made", ">made"),
    *("^main", "^^main", "main^99", "main~99999", "main^{tree}", "main^{blob}", "main^{", "main^{/", "main^{/[}"),
    *("@{-1}", "@{u}", "@{99 years ago}", "main@{0", "HEAD:kernels", ":kernels", "main:", ":(glob)**", "refs/heads/*"),
    *("0", "f" * 40, "0" * 40, "f" * 41, "f" * 100_000, "main\n", "\nmain", "main\tbranch", "\x1b[31mmain", "\x7f"),
    *("mäin", "\udcff", "\u202emain", "main\\", "'main", '"main', "%s", "%n%n", "{0}", "../main", "/etc/passwd", "~"),
)
"""Revisions that are options, shell code, patterns, other objects, too long or not text."""


@pytest.mark.parametrize("dots", ["..", "..."])
def test_a_hostile_revision_is_compared_or_one_line_and_runs_nothing(repository: Path, dots: str) -> None:
    for number, text in enumerate(HOSTILE):
        range_text = f"{text}{dots}branch" if number % 2 else f"main{dots}{text}"
        try:
            compare([], repository, range_text, ["colwise"])
        except errors.Fp8tuneError as error:
            assert "\n" not in str(error).strip() or "\n" in text
    assert not list(repository.glob("*made*"))
    changed = ["git", "-C", str(repository), "status", "--porcelain", "--ignored"]
    assert not subprocess.run(changed, check=True, capture_output=True).stdout


def test_a_kernel_of_another_repository_is_named_by_reference(repository: Path) -> None:
    evidence = [
        replace(rows(repository, side, "colwise", time_us), problem=Problem("colwise", SHAPE))
        for side, time_us in (("main", 200.0), ("branch", 100.0))
    ]
    folder = repository / "kernels/fp8tune_kernels/quantize"
    for kernel in ("fp8tune_kernels.quantize.colwise:SPEC", f"{folder}/colwise.py:SPEC"):
        comparison = compare(evidence, repository, "main..branch", [kernel])
        assert [(row.kernel, row.ratio) for row in comparison.rows] == [("colwise", 0.5)]


def test_json_keeps_the_contract(repository: Path) -> None:
    evidence = [rows(repository, "main", "colwise", 200.0), rows(repository, "branch", "colwise", 150.0)]
    found = compare(evidence, repository, "main..branch", ["colwise"])
    said = json.loads(json.dumps(contracts.comparison(found)))
    wanted = {"kernel": "colwise", "arch": "sm_90", "before_us": 200.0, "after_us": 150.0, "ratio": 0.75}
    assert {"rows", "geomean"} <= set(said)
    assert said["geomean"] == pytest.approx(0.75)
    assert wanted.items() <= said["rows"][0].items()
    assert said["rows"][0]["shape"] == {"M": 16640, "K": 5120, "G": 64}
    assert said["rows"][0]["verdict"] == "INCONCLUSIVE"
