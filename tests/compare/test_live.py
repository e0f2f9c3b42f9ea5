"""Live comparisons of planted kernels, on the simulated clock and with launches that break their process."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import fp8tune
from git_repositories import commit, git
from places import PLANTED

from fp8tune.comparing import checkout, live, verdicts
from fp8tune.comparing.sides import Kernel, Sides, sides
from fp8tune.comparing.timing import Launches, RowTimes, time_rounds
from fp8tune.comparing.verdicts import ChangeVerdict, Comparison, Revision
from fp8tune.errors import UsageError
from fp8tune.measure.arms import KernelArm, Place
from fp8tune.measure.backends import GpuBackend, interpreter
from fp8tune.measure.engine import Group, TimedBlock, Turn
from fp8tune.measure.simulated import SimulatedBackend
from fp8tune.measure.timing import UNGATED
from fp8tune.measure.trees import Tree, within
from fp8tune.measure.worker import RemoteError, Worker
from fp8tune.plan.shapes import Selection
from fp8tune.records import Device, NamedInts, Outcome, Problem, Status, Telemetry
from fp8tune.revisions.git import checkouts

VERSIONED = (PLANTED / "versioned.py").read_text()
SELECTIONS = [Selection((NamedInts(M=300, K=64, E=1),))]
CONFIG = NamedInts(BLOCK_SIZE=64, num_warps=4)


def version(name: str, *, factor: float = 2, toll: float = 1.0, comment: str = "") -> str:
    text = VERSIONED.replace('"versioned"', f'"{name}"').replace("FACTOR = 2", f"FACTOR = {factor}")
    return text.replace("TOLL = 1.0", f"TOLL = {toll}") + comment


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels that become 3 % slower or faster on the branch, or stay the same, are removed or added."""
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "-q", "-b", "main")
    before = {f"{name}.py": version(name) for name in ("slower", "faster", "same", "gone")}
    commit(folder, before | {"one.toml": "[[rows]]\nM = 300\nK = 64\nE = 1\n"})
    git(folder, "checkout", "-q", "-b", "branch")
    changed = {
        "gone.py": None,
        "slower.py": version("slower", factor=2.0, toll=1.035),
        "faster.py": version("faster", factor=2.0, toll=0.965),
        "same.py": version("same", comment="# in other words\n"),
        "fresh.py": version("fresh"),
    }
    commit(folder, changed)
    git(folder, "checkout", "-q", "main")
    return folder


def compared(repository: Path, revisions: str, *names: str, picks: str = "own") -> Comparison:
    both = sides(revisions, [f"{repository}/{name}.py:SPEC" for name in names])
    *_, last = live.compare(both, SELECTIONS, picks, SimulatedBackend("simulated:1"))
    assert isinstance(last, Comparison)
    return last


def test_planted_changes_get_their_verdicts(repository: Path) -> None:
    comparison = compared(repository, "main..branch", "slower", "faster", "same", "gone", "fresh")
    rows = {row.kernel: row for row in comparison.rows}
    assert {kernel: str(row.verdict) for kernel, row in rows.items()} == {
        "slower": "REGRESSION",
        "faster": "FASTER",
        "same": "SAME-CODE",
    }
    assert (comparison.added, comparison.removed, comparison.exit_code) == (1, 1, 1)
    for kernel, ratio in (("slower", 1.03), ("faster", 0.97)):
        effect = rows[kernel].effect
        assert effect is not None
        assert effect.lower(0.001) < math.log(ratio) < effect.upper(0.001)
        assert rows[kernel].n == verdicts.STAGE_TWO_ROUNDS
    assert comparison.overall is not None
    assert comparison.overall.interval[0] < 1 < comparison.overall.interval[1]
    assert comparison == compared(repository, "main..branch", "slower", "faster", "same", "gone", "fresh")


def test_uncommitted_work_is_compared(repository: Path) -> None:
    file = repository / "same.py"
    text = file.read_text()
    try:
        file.write_text(version("same", factor=2.0, toll=1.06))
        comparison = compared(repository, "main..WORKTREE", "same")
    finally:
        file.write_text(text)
    assert [row.verdict for row in comparison.rows] == [ChangeVerdict.REGRESSION]
    assert str(comparison.after).endswith("+")


def test_a_revision_against_itself_shows_the_noise(repository: Path) -> None:
    comparison = compared(repository, "main..main", "same", "gone")
    assert [row.verdict for row in comparison.rows] == [ChangeVerdict.CLEAR] * 2
    assert comparison.is_stable
    assert comparison.exit_code == 0


def test_retuning_finds_the_best_config_of_each_side(repository: Path) -> None:
    (row,) = compared(repository, "main..branch", "slower", picks="retune").rows
    assert row.before_config == row.after_config != CONFIG  # the default is slower
    assert row.verdict is ChangeVerdict.REGRESSION
    (row,) = compared(repository, "main..branch", "slower", picks="same").rows
    assert row.before_config == row.after_config == CONFIG


def test_the_command_prints_screens_documents_and_a_page(repository: Path) -> None:
    options = [
        "--kernel",
        "slower.py:SPEC",
        "--kernel",
        "same.py:SPEC",
        "--shapes",
        "one.toml",
        "--timer",
        "simulated:1",
    ]
    screen = fp8tune("compare", "main..branch", *options, cwd=repository)
    assert screen.returncode == 1
    lines = screen.stdout.splitlines()
    assert lines[0].startswith("1 REGRESSION, 1 SAME-CODE; 0.97x over 1 size")
    assert [line.split()[0] for line in lines[1:3]] == ["verdict", "REGRESSION"]
    assert lines[3].endswith("; 1 size not listed")
    assert max(map(len, lines)) <= 80
    every = fp8tune("compare", "main..branch", *options, "--all", "--format", "markdown", cwd=repository)
    assert "| SAME-CODE | same |" in every.stdout
    document = json.loads(fp8tune("compare", "main..branch", *options, "--format", "json", cwd=repository).stdout)
    assert [row["verdict"] for row in document["rows"]] == ["REGRESSION", "SAME-CODE"]
    row = document["rows"][0]
    assert row["lower"] < row["speedup"] < row["upper"] < 1
    page = fp8tune("compare", "main..branch", *options, "--format", "html", cwd=repository).stdout
    assert page.startswith("<!doctype html>")
    assert page.count("<tr") == 3
    assert "Not in this report" not in page
    assert "<script" not in page


# Outputs, which the simulated clock does not have


@pytest.fixture
def session(tmp_path: Path) -> live.Session:
    trees = [Tree(name, tmp_path / name, tmp_path / f"{name}-cache") for name in ("one", "two")]
    for tree in trees:
        tree.folder.mkdir()
    kernels = (Kernel("edited", "", ("1", "2")), Kernel("untouched", "", ("1", "1")))
    both = Sides(tmp_path, Revision("one", "1"), Revision("two", "2"), kernels)
    return live.Session(both, (trees[0], trees[1]), interpreter())


def launches(session: live.Session, kernel: str, before: str, after: str, M: int = 64) -> Launches:
    """Write both versions of a kernel; return its launches."""
    problem, arms = Problem(kernel, NamedInts(M=M, K=8)), []
    for tree, text in zip(session.trees, (before, after), strict=True):
        file = tree.folder / f"{kernel}.py"
        file.write_text(text)
        arms.append(KernelArm(f"{file}:SPEC", problem, CONFIG, NamedInts(K=8), 0))
    return Launches(*arms)


def drained(steps: Any) -> tuple[list[Any], Any]:
    """Return what a generator yields, and what it returns."""
    yielded: list[Any] = []
    while True:
        try:
            yielded.append(next(steps))
        except StopIteration as stopped:
            return yielded, stopped.value


def edged(name: str, *, is_partial: bool) -> str:
    """Return a version that declares an edge case, and perhaps never writes its last, partial block of 32 rows."""
    partial = "out[0][: len(given[0]) // 32 * 32].copy_(FACTOR * given[0][: len(given[0]) // 32 * 32])"
    edge = 'Edge("a block and one more", Problem(problem.kernel, NamedInts(M=33, K=8)))'
    text = version(name).replace("scaled_down=", f"edges=lambda problem: [{edge}],\n    scaled_down=")
    text = text.replace("import KernelSpec", "import Edge, KernelSpec")
    return text.replace("out[0].copy_(FACTOR * given[0])", partial) if is_partial else text


def test_outputs_are_checked_on_both_sides(session: live.Session) -> None:
    right, wrong = version("k"), version("k", factor=3)
    partial, whole = edged("k", is_partial=True), edged("k", is_partial=False)
    pairs = {
        "wrong": (right, wrong),
        "mended": (wrong, right),
        "both": (version("k", factor=5), wrong),
        "right": (right, right),
        "broken_edge": (whole, partial),
        "mended_edge": (partial, whole),
        "new_edge": (right, whole),
    }
    steps, checked = drained(session.with_right_outputs([launches(session, name, *two) for name, two in pairs.items()]))
    assert [step.done for step in steps] == list(range(1, 2 * len(pairs) + 1))
    assert [row.problem.kernel for row in checked] == ["right", "new_edge"]
    ended = {row.kernel: row for row in session.ended}
    assert {kernel: str(row.verdict) for kernel, row in ended.items()} == {
        "wrong": "WRONG",
        "both": "OPEN",
        "broken_edge": "WRONG",
    }
    assert session.added == 2
    assert "elements differ" in ended["wrong"].reason
    assert "a block and one more" in ended["broken_edge"].reason


def test_a_fault_in_the_binary_of_an_edge_case_alone_is_found(
    session: live.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timed launch is the same on both sides; the source of ``edited`` is not, so its outputs are checked."""
    same = [
        launches(session, name, edged(name, is_partial=False), edged(name, is_partial=True))
        for name in ("edited", "untouched")
    ]
    monkeypatch.setattr(
        live.Session, "launches", lambda self, kernel: iter_value([*same] if kernel.name == "edited" else [])
    )
    monkeypatch.setattr(live.Session, "split_by_code", lambda self, rows: iter_value(([], rows)))
    *_, comparison = session.run()
    assert isinstance(comparison, Comparison)
    assert {row.kernel: str(row.verdict) for row in comparison.rows} == {"edited": "WRONG", "untouched": "SAME-CODE"}


def iter_value(value: Any) -> Any:
    """Return a generator without steps that returns a value."""
    return value
    yield


def test_a_worker_has_the_kernels_of_one_side(session: live.Session) -> None:
    row = launches(session, "right", version("right"), version("right"))
    worker, (one, two), arguments = (
        Worker(),
        session.trees,
        ([Selection((NamedInts(M=8, K=8),))], session.backend.device),
    )
    try:
        declared = worker.call(60, within, one, checkout.declared, row.before.reference, *arguments)
        assert [problem.kernel for problem in declared.arms] == ["right"]
        assert worker.call(60, within, one, tempfile.gettempdir) == str(one.cache)
        with pytest.raises(UsageError, match="not from the checkout of one"):
            worker.call(60, within, one, checkout.declared, row.after.reference, *arguments)
        with pytest.raises(RemoteError, match="needs one of its own"):
            worker.call(60, within, two, checkout.declared, row.after.reference, *arguments)
    finally:
        worker.kill()


# Launches that break their process


def gpu(timeout_s: float = 60) -> GpuBackend:
    """Return a GPU whose clock the planted kernels replace."""
    backend = GpuBackend(Device("sm_90"), None, torch_device="cpu")
    backend.trial_timeout_s = timeout_s
    return backend


def breaking(session: live.Session, *sizes: int) -> list[Launches]:
    """Return a row for each K, which says how its second side breaks."""
    text = (PLANTED / "breaking.py").read_text()
    rows = []
    for K in sizes:
        row = launches(session, "breaking", text, text.replace("BREAKS = False", "BREAKS = True"))
        problem = Problem("breaking", NamedInts(M=2, K=K))
        rows.append(
            Launches(*(dataclasses.replace(arm, problem=problem, key=NamedInts(K=K), bytes_moved=K) for arm in row))
        )
    return rows


def timed(session: live.Session, *sizes: int, rounds: int = 2, timeout_s: float = 60) -> list[RowTimes]:
    _, times = drained(time_rounds(gpu(timeout_s), session.trees, breaking(session, *sizes), range(rounds)))
    return list(times)


@pytest.mark.parametrize("broken", [128, 256])
def test_a_launch_that_breaks_its_process_fails_its_own_row_only(session: live.Session, broken: int) -> None:
    """At its first launch, or later inside a block. Every later launch in that process would fail."""
    first, bad, last = timed(session, 64, broken, 64)
    assert bad.failure == "after: crashed: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert bad.changes == []
    for neighbour in (first, last):
        assert (neighbour.failure, neighbour.blocks) == ("", 12)
        assert neighbour.changes == neighbour.controls == [0.0, 0.0]


def test_a_worker_that_hangs_is_replaced(session: live.Session) -> None:
    times = timed(session, 64, 512, 64, rounds=1, timeout_s=6)
    assert [row.failure for row in times] == ["", "after: timeout: no answer in 6 s", ""]
    assert [row.blocks for row in times] == [6, 0, 6]


def test_a_config_that_breaks_its_process_is_not_the_fastest(session: live.Session) -> None:
    (row,) = breaking(session, 128)
    arms = [dataclasses.replace(row.after, config=NamedInts(BLOCK_SIZE=size, num_warps=4)) for size in (64, 128, 32)]
    assert live.fastest(gpu(), session.trees[1], [arms]) == [arms[2]]
    assert live.fastest(gpu(), session.trees[1], [arms[:2]]) == [arms[0]]  # none can be timed: the first


def test_disturbed_blocks_are_counted(session: live.Session) -> None:
    good = Outcome(Status.OK, time_us=100.0, telemetry=Telemetry(throttle_reasons=0x4))  # a power cap is normal
    hot = dataclasses.replace(good, telemetry=Telemetry(throttle_reasons=0x24))
    times = RowTimes(*breaking(session, 64))
    outcomes = [good, hot, good, dataclasses.replace(good, reason=UNGATED), good, good]
    arms = [arm for arm in times.arms for _ in range(2)]
    blocks = tuple(TimedBlock(arm, Place(), outcome) for arm, outcome in zip(arms, outcomes, strict=True))
    times.add(Turn(Group(times, times.arms), 0, blocks), "sm_90")
    assert sorted(times.disturbances.values()) == [1, 1]
    assert any("software thermal" in reason for reason in times.disturbances)
    times.add(Turn(Group(times, times.arms), 0, blocks), "gfx942")  # whose bits have another meaning
    assert sorted(times.disturbances.values()) == [1, 2]


# However it ends


@pytest.fixture
def long_run(repository: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a comparison that has its checkouts and goes on for a while."""
    (tmp_path / "many.toml").write_text("[[rows]]\nM = [" + ", ".join(map(str, range(100, 400))) + "]\nK = 64\nE = 1\n")
    arguments = ["compare", "main..main", "--timer", "simulated:1", "--kernel", f"{repository}/same.py:SPEC"]
    command = [sys.executable, "-m", "fp8tune", *arguments, "--shapes", str(tmp_path / "many.toml")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("fp8tune-*"))) < 2:  # checkouts and Triton cache
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield process
    process.kill()
    process.wait()


def test_checkouts_are_removed_when_it_is_stopped(
    long_run: subprocess.Popen[bytes], repository: Path, tmp_path: Path
) -> None:
    long_run.send_signal(signal.SIGTERM)
    assert long_run.wait(30) == 143
    assert not list(tmp_path.glob("fp8tune-*"))
    assert git(repository, "worktree", "list").count("\n") == 0
    assert not git(repository, "status", "--porcelain")


def test_checkouts_of_a_killed_run_are_removed_by_the_next(
    long_run: subprocess.Popen[bytes], repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with checkouts(repository, []):  # while the other run goes on
        assert len(list(tmp_path.glob("fp8tune-*"))) == 3
    long_run.kill()
    long_run.wait()
    time.sleep(0.2)
    with checkouts(repository, []):
        assert len(list(tmp_path.glob("fp8tune-compare-*"))) == 1
