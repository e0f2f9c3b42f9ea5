"""Live comparisons of planted kernels, on the simulated clock and with launches that break their process."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from git_repositories import commit, git
from places import PLANTED

from fp8tune import cli
from fp8tune.comparing import checkout, live, verdicts
from fp8tune.comparing.rounds import Row, time_rounds
from fp8tune.comparing.sides import Kernel, Sides, checked_out
from fp8tune.comparing.verdicts import ChangeVerdict, Comparison, Revision
from fp8tune.errors import UsageError
from fp8tune.measure.arms import KernelArm, Place
from fp8tune.measure.backends import GpuBackend, interpreter
from fp8tune.measure.engine import Group, TimedBlock, Turn
from fp8tune.measure.simulated import SimulatedBackend
from fp8tune.measure.timing import UNGATED
from fp8tune.measure.trees import Tree
from fp8tune.output import compare
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


def silent(*step: object) -> None:
    """Show no progress."""


def compared(repository: Path, revisions: str, *names: str, picks: str = "own") -> Comparison:
    with checked_out(revisions, [f"{repository}/{name}.py:SPEC" for name in names]) as sides:
        return live.compare(sides, SELECTIONS, picks, SimulatedBackend("simulated:1"), silent)


def test_planted_changes_get_their_verdicts(repository: Path) -> None:
    comparison = compared(repository, "main..branch", "slower", "faster", "same", "gone", "fresh")
    rows = {row.kernel: row for row in comparison.rows}
    expected = {"slower": "REGRESSION", "faster": "FASTER", "same": "SAME-CODE"}
    assert {kernel: str(row.verdict) for kernel, row in rows.items()} == expected
    assert (comparison.added, comparison.removed, comparison.exit_code) == (1, 1, 1)
    for kernel, ratio in (("slower", 1.03), ("faster", 0.97)):
        effect = rows[kernel].effect
        assert effect is not None
        assert effect.lower(0.001) < math.log(ratio) < effect.upper(0.001)
        assert rows[kernel].n == verdicts.STAGE_TWO_ROUNDS
    assert comparison.overall is not None
    assert comparison.overall.interval[0] < 1 < comparison.overall.interval[1]


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
    """A simulated clock checks no output, and so nothing is CLEAR."""
    comparison = compared(repository, "main..main", "same", "gone")
    assert [(row.verdict, row.reason) for row in comparison.rows] == [(ChangeVerdict.OPEN, verdicts.SIMULATED)] * 2
    assert comparison.is_stable
    assert comparison.exit_code == 3


def test_a_simulated_gain_is_no_all_clear(repository: Path) -> None:
    comparison = compared(repository, "main..branch", "faster")
    assert [row.verdict for row in comparison.rows] == [ChangeVerdict.FASTER]
    assert comparison.exit_code == 3
    assert "(simulated)" in compare.title(compare.make(comparison))


def test_retuning_finds_the_best_config_of_each_side(repository: Path) -> None:
    (row,) = compared(repository, "main..branch", "slower", picks="retune").rows
    assert row.before_config == row.after_config != CONFIG  # the default is slower
    assert row.verdict is ChangeVerdict.REGRESSION
    (row,) = compared(repository, "main..branch", "slower", picks="same").rows
    assert row.before_config == row.after_config == CONFIG


# Outputs, which the simulated clock does not have


@pytest.fixture
def session(tmp_path: Path) -> live.Session:
    trees = (
        Tree("one", tmp_path / "one", tmp_path / "one-cache"),
        Tree("two", tmp_path / "two", tmp_path / "two-cache"),
    )
    for tree in trees:
        tree.folder.mkdir()
    kernels = (Kernel("edited", ("", ""), ("1", "2")), Kernel("untouched", ("", ""), ("1", "1")))
    sides = Sides(Revision("one", "1"), Revision("two", "2"), (trees[0].folder, trees[1].folder), kernels)
    return live.Session(sides, trees, interpreter(), silent)


def launches(session: live.Session, kernel: str, before: str, after: str) -> Row:
    """Write both versions of a kernel; return its launches."""
    arms = []
    for tree, text in zip(session.trees, (before, after), strict=True):
        file = tree.folder / f"{kernel}.py"
        file.write_text(text)
        arms.append(KernelArm(f"{file}:SPEC", Problem(kernel, NamedInts(M=64, K=8)), CONFIG, NamedInts(K=8), 0))
    return Row(*arms)


def edged(name: str, *, is_partial: bool) -> str:
    """Return a version that declares an edge case, and perhaps never writes its last, partial block of 32 rows."""
    edge = 'Edge("a block and one more", Problem(problem.kernel, NamedInts(M=33, K=8)))'
    text = version(name).replace("scaled_down=", f"edges=lambda problem: [{edge}],\n    scaled_down=")
    text = text.replace("import KernelSpec", "import Edge, KernelSpec")
    whole = r"out\[0\]\.copy_\(FACTOR \* (\w+)\[0\]\)"
    partial = r"rows = len(\1[0]) // 32 * 32; out[0][:rows].copy_(FACTOR * \1[0][:rows])"
    text, count = re.subn(whole, partial if is_partial else r"\g<0>", text)
    assert count == 1
    return text


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
    session.rows = [launches(session, name, *texts) for name, texts in pairs.items()]
    session.check([*session.rows])
    rows = {row.problem.kernel: row for row in session.rows}
    assert {kernel: row.verdict for kernel, row in rows.items()} == {
        "wrong": ChangeVerdict.WRONG,
        "both": ChangeVerdict.OPEN,
        "right": None,
        "broken_edge": ChangeVerdict.WRONG,
        "new_edge": None,
    }
    assert session.added == 2
    assert "elements differ" in rows["wrong"].reason
    assert "a block and one more" in rows["broken_edge"].reason


def test_a_fault_in_the_binary_of_an_edge_case_alone_is_found(
    session: live.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timed launch is the same on both sides; the source of ``edited`` is not, so its outputs are checked."""
    texts = {name: (edged(name, is_partial=False), edged(name, is_partial=True)) for name in ("edited", "untouched")}
    rows = {name: [launches(session, name, *pair)] for name, pair in texts.items()}
    monkeypatch.setattr(live.Session, "load", lambda self, kernel, *_: rows[kernel.name])
    monkeypatch.setattr(live.Session, "with_same_code", lambda self: [*self.rows])
    comparison = session.run((), "own")
    assert {row.kernel: str(row.verdict) for row in comparison.rows} == {"edited": "WRONG", "untouched": "SAME-CODE"}


def test_a_worker_has_the_kernels_of_one_side(session: live.Session) -> None:
    row = launches(session, "right", version("right"), version("right"))
    arguments, (tree, _) = ([Selection((NamedInts(M=8, K=8),))], session.backend.device), session.trees
    own, foreign = session.call(
        [(tree, "own", (row.before.reference, *arguments)), (tree, "foreign", (row.after.reference, *arguments))],
        checkout.launches,
        "",
    )
    assert not isinstance(own, UsageError)
    assert [problem.kernel for problem in own[1]] == ["right"]
    assert "not from the checkout of one" in str(foreign)


# Launches that break their process


def gpu(timeout_s: float = 60) -> GpuBackend:
    """Return a GPU whose clock the planted kernels replace."""
    backend = GpuBackend(Device("sm_90"), None, torch_device="cpu")
    backend.trial_timeout_s = timeout_s
    return backend


def breaking(session: live.Session, *sizes: int) -> list[Row]:
    """Return a row for each K, which says how its second side breaks."""
    text = (PLANTED / "breaking.py").read_text()
    row, rows = launches(session, "breaking", text, text.replace("BREAKS = False", "BREAKS = True")), []
    for K in sizes:
        changes: dict[str, Any] = {"problem": Problem("breaking", NamedInts(M=2, K=K)), "key": NamedInts(K=K)}
        rows.append(Row(*(replace(arm, bytes_moved=K, **changes) for arm in row.arms)))
    return rows


@pytest.mark.parametrize(
    ("broken", "failure"),
    [
        (128, "after: crashed: RuntimeError: CUDA error: an illegal memory access was encountered"),
        (256, "after: crashed: RuntimeError: CUDA error: an illegal memory access was encountered"),
        (512, "after: timeout: no answer in 4 s"),
    ],
    ids=["at its first launch", "inside a block", "hangs"],
)
def test_a_launch_that_breaks_its_process_fails_its_own_row_only(
    session: live.Session, broken: int, failure: str
) -> None:
    rows = breaking(session, 64, broken, 64)
    time_rounds(gpu(4 if broken == 512 else 60), session.trees, rows, range(1), silent)
    assert [row.reason for row in rows] == ["", failure, ""]
    assert [row.changes() for row in rows] == [[0.0], [], [0.0]]
    assert [row.blocks for row in rows] == [6, 0, 6]


def test_a_config_that_breaks_its_process_is_not_the_fastest(session: live.Session) -> None:
    (row,) = breaking(session, 128)
    arms = [replace(row.after, config=NamedInts(BLOCK_SIZE=size, num_warps=4)) for size in (64, 128, 32)]
    assert live.fastest(gpu(), session.trees[1], [arms]) == [arms[2]]
    assert live.fastest(gpu(), session.trees[1], [arms[:2]]) == [arms[0]]  # none can be timed: the first


def test_disturbed_blocks_are_counted(session: live.Session) -> None:
    good = Outcome(Status.OK, time_us=100.0, telemetry=Telemetry(throttle_reasons=0x4))  # a power cap is normal
    hot = replace(good, telemetry=Telemetry(throttle_reasons=0x24))
    (row,) = breaking(session, 64)
    outcomes = [good, hot, good, replace(good, reason=UNGATED), good, good]
    arms = [replace(row.before, seat=seat) for seat in (0, 0, 1, 1, 2, 2)]
    blocks = tuple(TimedBlock(arm, Place(), outcome) for arm, outcome in zip(arms, outcomes, strict=True))
    row.add(Turn(Group(row, arms), 0, blocks), "sm_90")
    assert sorted(row.disturbances.values()) == [1, 1]
    assert any("software thermal" in reason for reason in row.disturbances)
    row.add(Turn(Group(row, arms), 0, blocks), "gfx942")  # whose bits have another meaning
    assert sorted(row.disturbances.values()) == [1, 2]


# However it ends


@pytest.fixture
def long_run(repository: Path, tmp_path: Path) -> Forked:
    """Start a comparison that has its checkouts and goes on for a while."""
    (tmp_path / "many.toml").write_text(f"[[rows]]\nM = {[*range(100, 400)]}\nK = 64\nE = 1\n")
    arguments = ["compare", "main..main", "--timer", "simulated:1", "--kernel", f"{repository}/same.py:SPEC"]

    def compare() -> None:
        tempfile.tempdir = str(tmp_path)
        sys.argv = ["fp8tune", *arguments, "--shapes", str(tmp_path / "many.toml")]
        cli.main()

    process = Forked(compare)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("fp8tune-*"))) < 2:  # checkouts and Triton cache
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def test_checkouts_are_removed_when_it_is_stopped(long_run: Forked, repository: Path, tmp_path: Path) -> None:
    os.kill(long_run.pid, signal.SIGTERM)
    assert long_run.wait()[0] == 143
    assert not list(tmp_path.glob("fp8tune-*"))
    assert git(repository, "worktree", "list").count("\n") == 0
    assert not git(repository, "status", "--porcelain")


def test_checkouts_of_a_killed_run_are_removed_by_the_next(
    long_run: Forked, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with checkouts(repository, []):  # while the other run goes on
        assert len(list(tmp_path.glob("fp8tune-*"))) == 3
    long_run.kill()
    time.sleep(0.2)
    with checkouts(repository, []):
        assert len(list(tmp_path.glob("fp8tune-compare-*"))) == 1
