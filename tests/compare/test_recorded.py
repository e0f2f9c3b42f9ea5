"""Comparisons of two revisions of planted kernels in a repository, by recorded results."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import fp8tune
from database_rows import merged, study_of
from git_repositories import commit, git
from places import PLANTED

from fp8tune import errors
from fp8tune.comparing import recorded
from fp8tune.comparing.sides import checked_out
from fp8tune.comparing.verdicts import ComparedRow, Comparison
from fp8tune.plan.shapes import Selection, Settings
from fp8tune.records import Compiler, Device, FinalsRun, KernelVersion, Kind, NamedInts, Problem, ProcessTimes, Status
from fp8tune.revisions import source
from fp8tune.revisions.git import checkouts, resolve
from fp8tune.stats.same_code import Programs
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
SPREAD = (0.998, 0.999, 1.001, 1.002)


def file_of(kernel: str) -> str:
    return f"kernels/fp8tune_kernels/quantize/{kernel.replace('-', '_')}.py"


def files(**scales: int) -> dict[str, str | None]:
    names = {name.replace("_", "-"): scale for name, scale in scales.items()}
    return {file_of(name): KERNEL.format(scale=scale, name=name) for name, scale in names.items()}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On the branch colwise changes, rowwise-2d does not, rowwise is added and mxfp8-dim0 removed."""
    folder = tmp_path_factory.mktemp("original")
    git(folder, "init", "-q", "-b", "main")
    commit(folder, files(colwise=1, rowwise_2d=1, mxfp8_dim0=1))
    git(folder, "checkout", "-q", "-b", "branch")
    commit(folder, files(colwise=2, rowwise=1) | {file_of("mxfp8-dim0"): None})
    return folder


@pytest.fixture
def repository(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path, dirs_exist_ok=True)


def results(
    repository: Path, revision: str, kernel: str, *times_us: float, device: Device = H100, config: NamedInts = CONFIG
) -> Study:
    """Return what a sweep of the kernel at a revision would store; with several times they are confirmed."""
    with checkouts(repository, [resolve(repository, revision)]) as (checkout,):
        source_hash = source.source_hash(kernel, source.source_roots(checkout))
    run = FinalsRun("a sweep", tie_band=0.01, keep_band=0.015)
    finals = tuple(ProcessTimes(run, f"final {n:02d}", ((0, time_us),)) for n, time_us in enumerate(times_us))
    version = KernelVersion(kernel, source_hash, CONFIG, (("BLOCK_SIZE", (32,)), ("num_warps", (4,))))
    finals = finals if len(times_us) > 1 else ()
    problem = Problem(kernel, SHAPE, routing="jagged")
    return study_of(problem, config, device, Kind.MEASURED, Status.OK, times_us, version, finals=finals)


def compare(
    studies: Sequence[Study], repository: Path, text: str = "main..branch", kernels: Sequence[str] = ("colwise",)
) -> Comparison:
    with checked_out(text, kernels, repository) as sides:
        return recorded.compare(merged(studies), sides)


def row_of(repository: Path, *studies: Study, text: str = "main..branch") -> ComparedRow:
    (row,) = compare(studies, repository, text).rows
    return row


@pytest.mark.parametrize(
    ("factor", "verdict", "code"), [(0.75, "FASTER", 0), (1.001, "CLEAR", 0), (1.25, "REGRESSION", 1)]
)
def test_four_processes_a_side_are_enough_for_a_verdict(
    repository: Path, factor: float, verdict: str, code: int
) -> None:
    before = results(repository, "main", "colwise", *(200.0 * x for x in SPREAD))
    after = results(repository, "branch", "colwise", *(200.0 * factor * x for x in SPREAD))
    comparison = compare([before, after], repository)
    (row,) = comparison.rows
    assert (row.verdict, row.n, row.reason, comparison.exit_code) == (verdict, 4, "", code)
    assert row.effect is not None
    assert row.effect.interval[0] < factor < row.effect.interval[1]


def test_each_side_has_its_own_best_config(repository: Path) -> None:
    second = NamedInts(BLOCK_SIZE=64, num_warps=4)
    studies = [
        results(repository, "main", "colwise", 200.0),
        results(repository, "main", "colwise", 180.0, config=second),
        results(repository, "branch", "colwise", 150.0),
        results(repository, "branch", "colwise", 190.0, config=second),
    ]
    row = row_of(repository, *studies)
    assert (row.before_us, row.after_us) == (180.0, 150.0)


def test_all_kernels_of_a_repository_are_compared(repository: Path) -> None:
    studies = [
        results(repository, "main", "colwise", 200.0),
        results(repository, "main", "rowwise-2d", 90.0),
        results(repository, "branch", "rowwise", 80.0),
        results(repository, "main", "mxfp8-dim0", 70.0),
    ]
    comparison = compare(studies, repository, kernels=())
    rows = {row.kernel: row for row in comparison.rows}
    assert {kernel: row.verdict for kernel, row in rows.items()} == {"rowwise-2d": "SAME-CODE", "colwise": "OPEN"}
    assert (comparison.added, comparison.removed) == (1, 1)
    assert "run fp8tune sweep there" in rows["colwise"].reason
    assert rows["rowwise-2d"].ratio == 1.0


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"driver": "570.1"}, "driver 580.95 against 570.1"),
        ({"triton": "3.7.1"}, "triton 3.6.0 against 3.7.1"),
        ({"name": "NVIDIA H200", "uuid_hash": "2" * 16}, "name NVIDIA H100 against NVIDIA H200"),
    ],
)
def test_unlike_devices_and_versions_are_never_compared(
    repository: Path, change: dict[str, str], difference: str
) -> None:
    elsewhere = results(repository, "branch", "colwise", 150.0, device=replace(H100, **change))
    comparison = compare([results(repository, "main", "colwise", 200.0), elsewhere], repository)
    assert [row.verdict for row in comparison.rows] == ["OPEN", "OPEN"]
    assert any("never compared" in row.reason and difference in row.reason for row in comparison.rows)
    assert comparison.exit_code == 3


@pytest.mark.parametrize(
    ("change", "code", "verdict"),
    [
        ({"triton": "3.7.1"}, {"3.6.0": "a1", "3.7.1": "a1"}, "FASTER"),
        ({"triton": "3.7.1", "codegen": "fp_fusion=0"}, {"3.6.0": "a1", "3.7.1": "a1"}, "OPEN"),
        ({"triton": "3.7.1", "driver": "570.1"}, {"3.6.0": "a1", "3.7.1": "a1"}, "OPEN"),
        ({"triton": "3.7.1"}, {"3.6.0": "a1", "3.7.1": "a2"}, "OPEN"),
        ({"triton": "3.7.1"}, {"3.6.0": "a1"}, "OPEN"),
    ],
)
@pytest.mark.parametrize("known", ["main", "branch"])
def test_versions_of_triton_are_compared_where_one_side_has_the_same_machine_code_by_both(
    repository: Path, change: dict[str, str], code: dict[str, str], verdict: str, known: str
) -> None:
    before = results(repository, "main", "colwise", *(200.0 * x for x in SPREAD))
    device = replace(H100, **change)
    after = results(repository, "branch", "colwise", *(150.0 * x for x in SPREAD), device=device)
    study = before if known == "main" else after
    hashes = {Compiler("sm_90", version): value for version, value in code.items()}
    programs = Programs({(study.problem, study.source_hash, CONFIG): hashes})
    with checked_out("main..branch", ["colwise"], repository) as both:
        rows = recorded.compare([before, after], both, lambda: programs).rows
    assert {row.verdict for row in rows} == {verdict}
    assert len(rows) == (1 if verdict == "FASTER" else 2)


def test_simulated_results_are_never_clear(repository: Path) -> None:
    studies = [results(repository, side, "colwise", *(200.0 * x for x in SPREAD)) for side in ("main", "branch")]
    comparison = compare([replace(study, kind=Kind.SIMULATED) for study in studies], repository)
    assert [(row.verdict, row.kind) for row in comparison.rows] == [("OPEN", Kind.SIMULATED)]
    assert comparison.exit_code == 3


def test_recorded_results_are_selected_by_shape(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path, {"k.py": (PLANTED / "versioned.py").read_text()})
    large = NamedInts(M=64, K=8)
    problems = [
        Problem("versioned", shape, routing) for shape in (large, NamedInts(M=30, K=8)) for routing in ("none", "zipf")
    ]
    studies = [
        study_of(problem, CONFIG, H100, Kind.MEASURED, Status.OK, [1.0], KernelVersion("versioned", "1"))
        for problem in problems
    ]
    with checked_out("main..main", [f"{tmp_path}/k.py:SPEC"]) as sides:
        chosen = recorded.selected(studies, sides, [Selection((large,))])
        assert [study.problem for study in chosen] == problems[:2]
        chosen = recorded.selected(studies, sides, [Selection((large,), settings=Settings(routing="zipf"))])
        assert [study.problem for study in chosen] == problems[1:2]
        with pytest.raises(errors.UsageError, match="hold no problem"):
            recorded.selected(studies, sides, [Selection((NamedInts(T=1),))])


def test_an_unknown_shape_set_is_an_error_for_recorded_results(repository: Path) -> None:
    done = fp8tune("compare", "main..branch", "--db", "none.db", "--shapes", "no-such-set", cwd=repository)
    assert (done.returncode, "no-such-set" in done.stderr) == (2, True)


@pytest.mark.parametrize("kind", [Kind.INTERPRETER, Kind.STATIC, Kind.PUBLISHED])
def test_results_that_are_no_times_of_ours_do_not_count(repository: Path, kind: Kind) -> None:
    studies = [replace(results(repository, side, "colwise", 1.0), kind=kind) for side in ("main", "branch")]
    row = row_of(repository, *studies)
    assert (row.verdict, row.before_us, row.problem) == ("OPEN", None, None)


def test_the_geometric_mean_is_over_changed_code(repository: Path) -> None:
    changed = [results(repository, "main", "colwise", 100.0), results(repository, "branch", "colwise", 25.0)]
    both = [results(repository, side, "colwise", 50.0) for side in ("main", "branch")]
    second = [replace(study, problem=replace(study.problem, shape=NamedInts(M=1, K=1, G=1))) for study in both]
    same = results(repository, "main", "rowwise-2d", 90.0)
    assert compare([*changed, *second, same], repository, kernels=()).ratio == pytest.approx(0.5)
    assert compare([same], repository, kernels=("rowwise-2d",)).ratio == 1.0
    assert compare([same], repository).ratio is None


def test_a_repository_without_our_kernels_needs_a_name(tmp_path: Path) -> None:
    """It was compared with the exit code of an open verdict, and nothing said what to do."""
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path, {"ops.py": "pass\n"})
    with pytest.raises(errors.UsageError, match="--kernel"):
        compare([], tmp_path, "main..main", kernels=())


def test_three_dots_start_at_the_merge_base_and_a_kernel_file_names_its_repository(repository: Path) -> None:
    studies = [results(repository, "main", "colwise", 200.0), results(repository, "branch", "colwise", 150.0)]
    (row,) = compare(studies, repository, kernels=[f"{repository}/{file_of('colwise')}:SPEC"]).rows
    assert (row.kernel, row.ratio) == ("colwise", 0.75)
    git(repository, "checkout", "-q", "main")
    commit(repository, files(colwise=3))
    assert row_of(repository, *studies, text="main..branch").ratio is None
    assert row_of(repository, *studies, text="main...branch").ratio == 0.75


def test_a_malformed_range_is_one_line(repository: Path) -> None:
    for text in ("main", "main..", "..branch", "a..b..c", "a....b", "..", "", "main branch"):
        with pytest.raises(errors.UsageError, match="two revisions"):
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


def test_a_hostile_revision_is_compared_or_one_line_and_runs_nothing(repository: Path) -> None:
    for number, text in enumerate(HOSTILE):
        dots = "..." if number % 3 else ".."
        range_text = f"{text}{dots}branch" if number % 2 else f"main{dots}{text}"
        try:
            compare([], repository, range_text)
        except errors.Fp8tuneError as error:
            assert "\n" not in str(error).strip() or "\n" in text
    assert not list(repository.glob("*made*"))
    changed = ["git", "-C", str(repository), "status", "--porcelain", "--ignored"]
    assert not subprocess.run(changed, check=True, capture_output=True).stdout
