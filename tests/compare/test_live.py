"""`compare` as it runs: two revisions of planted kernels checked out, judged and timed on the simulated clock."""

from __future__ import annotations

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
from git_repositories import commit, git
from places import PLANTED

from fp8tune.comparing import live, tree, verdicts
from fp8tune.comparing.comparison import Comparison, Revision
from fp8tune.comparing.options import CompareOptions, Configs
from fp8tune.comparing.rows import Plan, Row, with_right_bytes, with_right_edges
from fp8tune.comparing.sides import Kernel, Sides
from fp8tune.comparing.verdicts import ChangeVerdict
from fp8tune.errors import UsageError
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.backends.interpreter import InterpreterBackend
from fp8tune.measure.backends.simulated import SimulatedBackend
from fp8tune.measure.trees import Tree, within
from fp8tune.measure.worker import RemoteError, Worker
from fp8tune.records import NamedInts, Problem
from fp8tune.render import contracts
from fp8tune.revisions.git import checkouts

VERSIONED = (PLANTED / "versioned.py").read_text()
SHAPES = "[[rows]]\nM = 300\nK = 64\nE = 1\n"


def version(name: str, *, factor: float = 2, toll: float = 1.0, comment: str = "") -> str:
    text = VERSIONED.replace('"versioned"', f'"{name}"').replace("FACTOR = 2", f"FACTOR = {factor}")
    return text.replace("TOLL = 1.0", f"TOLL = {toll}") + comment


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """slower is 3 % slower on the branch, faster 3 % faster, same has one more comment; gone goes, fresh comes."""
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "-q", "-b", "main")
    commit(
        folder, {f"{name}.py": version(name) for name in ("slower", "faster", "same", "gone")} | {"one.toml": SHAPES}
    )
    git(folder, "checkout", "-q", "-b", "branch")
    changed = {
        "gone.py": None,
        "slower.py": version("slower", factor=2.0, toll=1.035),
        "faster.py": version("faster", factor=2.0, toll=0.965),
        "same.py": version("same", comment="# said differently\n"),
        "fresh.py": version("fresh"),
    }
    commit(folder, changed)
    git(folder, "checkout", "-q", "main")
    return folder


def compared(repository: Path, range_text: str = "main..branch", *names: str, **chosen: object) -> Comparison:
    options = CompareOptions(
        revisions=range_text,
        repository=repository,
        kernels=tuple(f"{repository}/{name}.py:SPEC" for name in names),
        shapes=(str(repository / "one.toml"),),
        **chosen,  # type: ignore[arg-type]
    )
    *_, last = live.compare(options, SimulatedBackend("simulated:1"))
    assert isinstance(last, Comparison)
    return last


def test_each_row_ends_in_its_word(repository: Path) -> None:
    told = compared(repository, "main..branch", "slower", "faster", "same", "gone", "fresh")
    assert {row.kernel: str(row.verdict) for row in told.rows} == {
        "slower": "REGRESSION",
        "faster": "IMPROVEMENT",
        "same": "SAME-CODE",
        "gone": "REMOVED",
        "fresh": "NEW",
    }
    rows = {row.kernel: row for row in told.rows}
    for kernel, ratio in (("slower", 1.03), ("faster", 0.97)):
        effect = rows[kernel].effect
        assert effect is not None
        assert effect.lower(0.001) < math.log(ratio) < effect.upper(0.001)  # the 95 % interval misses one seed in 20
        assert rows[kernel].n == verdicts.STAGE_TWO_ROUNDS
    assert rows["same"].n == verdicts.STAGE_ONE_ROUNDS  # a free control
    assert rows["same"].is_stable
    assert told.overall is not None
    assert told.overall.interval[0] < 1 < told.overall.interval[1]
    assert told.exit_code == 1


def test_uncommitted_work_is_compared(repository: Path) -> None:
    file = repository / "same.py"
    text = file.read_text()
    try:
        file.write_text(version("same", factor=2.0, toll=1.06))
        told = compared(repository, "main..WORKTREE", "same")
    finally:
        file.write_text(text)
    assert [row.verdict for row in told.rows] == [ChangeVerdict.REGRESSION]
    assert told.after.commit.endswith("+")


def test_blind_times_what_is_the_same(repository: Path) -> None:
    told = compared(repository, "main..main", "same", "gone", blind=True)
    assert {row.verdict for row in told.rows} == {ChangeVerdict.CLEAR}
    assert told.is_stable
    assert told.exit_code == 0


def test_identical_code_is_not_timed(repository: Path) -> None:
    told = compared(repository, "main..main", "same")
    assert [(row.verdict, row.before_us) for row in told.rows] == [(ChangeVerdict.SAME_CODE, None)]
    assert (told.geomean, told.is_stable, told.exit_code) == (1.0, None, 0)


def test_retuning_searches_both_sides(repository: Path) -> None:
    told = compared(repository, "main..branch", "slower", configs=Configs.RETUNE)
    (row,) = told.rows
    assert row.before_config == row.after_config  # the clock's best is the same config on both
    assert row.before_config in [NamedInts(BLOCK_SIZE=b, num_warps=w) for b in (32, 64, 128) for w in (4, 8)]
    assert row.before_config != NamedInts(BLOCK_SIZE=64, num_warps=4)  # not the default, which is slower
    assert row.verdict is ChangeVerdict.REGRESSION


def test_the_same_seed_gives_the_same_verdicts(repository: Path) -> None:
    one, other = (contracts.comparison(compared(repository, "main..branch", "faster")) for _ in range(2))
    assert one == other


# Bytes, which the simulated clock has none of


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Two sides whose ``wrong`` differs on the second, and ``mended`` on the first."""
    trees = []
    for name, wrong, mended in (("one", 2, 3), ("two", 3, 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "wrong.py").write_text(version("wrong", factor=wrong))
        (tmp_path / name / "mended.py").write_text(version("mended", factor=mended))
        (tmp_path / name / "both.py").write_text(version("both", factor=5))
        (tmp_path / name / "right.py").write_text(version("right"))
        trees.append(Tree(name, tmp_path / name, tmp_path / f"{name}-cache"))
    kernels = (Kernel("edited", "", ("1", "2")), Kernel("untouched", "", ("1", "1")))
    sides = Sides(tmp_path, Revision("one", ""), Revision("two", ""), kernels)
    return Plan(CompareOptions(revisions="one..two"), sides, (trees[0], trees[1]), InterpreterBackend(), ())


def row(plan: Plan, kernel: str, M: int = 8) -> Row:
    config, problem = NamedInts(BLOCK_SIZE=64, num_warps=4), Problem(kernel, NamedInts(M=M, K=8))
    before, after = (
        KernelArm(f"{of.folder}/{kernel}.py:SPEC", problem, config, NamedInts(K=8), 0) for of in plan.trees
    )
    return Row(before, after)


def drained(steps: Any) -> tuple[list[Any], Any]:
    """What a generator yields, and what it returns."""
    told: list[Any] = []
    while True:
        try:
            told.append(next(steps))
        except StopIteration as stopped:
            return told, stopped.value


def test_bytes_are_checked_on_both_sides(plan: Plan) -> None:
    rows = [row(plan, kernel) for kernel in ("wrong", "mended", "both", "right")]
    steps, (right, ended) = drained(with_right_bytes(plan, rows))
    assert [step.done for step in steps] == list(range(1, 9))
    assert [end.verdict for end in ended] == [
        ChangeVerdict.NEWLY_WRONG,
        ChangeVerdict.NEW,
        ChangeVerdict.INCONCLUSIVE,
    ]
    assert right == rows[3:]
    assert "64 of 64 elements differ" in ended[0].reason


PARTIAL = "out[0][: len(given[0]) // 32 * 32].copy_(FACTOR * given[0][: len(given[0]) // 32 * 32])"
"""The last, partial block of 32 rows is never written: right on round sizes."""


def edged(name: str, *, partial: bool) -> str:
    """A version that declares an edge, and perhaps is wrong there."""
    edge = 'Edge("a block and one more", Problem(problem.kernel, NamedInts(M=33, K=8)))'
    text = version(name).replace("scaled_down=", f"edges=lambda problem: [{edge}],\n    scaled_down=")
    text = text.replace("import KernelSpec", "import Edge, KernelSpec")
    return text.replace("out[0].copy_(FACTOR * given[0])", PARTIAL) if partial else text


def test_each_side_is_held_to_the_edges_it_declares(plan: Plan) -> None:
    """The first side of ``broken`` is right there, that of ``declared`` is from before specs had edges."""
    versions = {
        "broken": (edged("broken", partial=False), edged("broken", partial=True)),
        "mended": (edged("mended", partial=True), edged("mended", partial=False)),
        "declared": (version("declared"), edged("declared", partial=False)),
        "both": (edged("both", partial=True), edged("both", partial=True)),
    }
    for name, texts in versions.items():
        for of, text in zip(plan.trees, texts, strict=True):
            (of.folder / f"{name}.py").write_text(text)
    _, (right, ended) = drained(with_right_bytes(plan, [row(plan, name, M=64) for name in versions]))
    assert [end.verdict for end in ended] == [
        ChangeVerdict.NEWLY_WRONG,
        ChangeVerdict.NEW,
        ChangeVerdict.INCONCLUSIVE,
    ]
    assert [each.problem.kernel for each in right] == ["declared"]
    assert "8 of 264 elements differ" in ended[0].reason
    assert "a block and one more" in ended[0].reason


def test_a_fault_in_the_binary_of_an_edge_alone_is_found(plan: Plan) -> None:
    """What is timed is the same on both sides. The text of ``edited`` is not, so its bytes are checked."""
    for name in ("edited", "untouched"):
        for of, is_partial in zip(plan.trees, (False, True), strict=True):
            (of.folder / f"{name}.py").write_text(edged(name, partial=is_partial))
    same = [row(plan, name, M=64) for name in ("edited", "untouched")]
    _, (left, ended) = drained(with_right_edges(plan, same))
    assert left == same[1:]
    assert [each.verdict for each in ended] == [ChangeVerdict.NEWLY_WRONG]


def test_a_worker_has_the_kernels_of_one_side(plan: Plan) -> None:
    worker, (one, two) = Worker(), plan.trees
    given = (plan.options, [NamedInts(M=8, K=8)], plan.device)
    try:
        declared = worker.call(60, within, one, tree.declared, f"{one.folder}/right.py:SPEC", *given)
        assert [problem.kernel for problem in declared.arms] == ["right"]
        assert worker.call(60, within, one, tempfile.gettempdir) == str(one.cache)
        with pytest.raises(UsageError, match="not from the checkout of one"):
            worker.call(60, within, one, tree.declared, f"{two.folder}/right.py:SPEC", *given)
        with pytest.raises(RemoteError, match="needs one of its own"):
            worker.call(60, within, two, tree.declared, f"{two.folder}/right.py:SPEC", *given)
    finally:
        worker.kill()


# However it ends


@pytest.fixture
def long_run(repository: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A comparison that has its checkouts and goes on for a while."""
    (tmp_path / "many.toml").write_text("[[rows]]\nM = [" + ", ".join(map(str, range(100, 400))) + "]\nK = 64\nE = 1\n")
    arguments = ["compare", "main..main", "--blind", "--repo", str(repository), "--timer", "simulated:1"]
    arguments += ["--kernel", f"{repository}/same.py:SPEC", "--shapes", str(tmp_path / "many.toml")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "fp8tune", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    ends = time.monotonic() + 60
    while len(list(tmp_path.glob("fp8tune-*"))) < 2:  # checkouts and Triton cache
        assert process.poll() is None, "it ended before it could be stopped"
        assert time.monotonic() < ends, "no checkouts after a minute"
        time.sleep(0.05)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_checkouts_go_when_it_is_stopped(
    number: int, code: int, long_run: subprocess.Popen[bytes], repository: Path, tmp_path: Path
) -> None:
    long_run.send_signal(number)
    assert long_run.wait(30) == code
    assert not list(tmp_path.glob("fp8tune-*"))
    assert git(repository, "worktree", "list").count("\n") == 0
    assert not git(repository, "status", "--porcelain")


def test_what_a_killed_run_left_goes_with_the_next(
    long_run: subprocess.Popen[bytes], repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with checkouts(repository, []):  # of another run, while that one goes on
        assert len(list(tmp_path.glob("fp8tune-*"))) == 3
    long_run.kill()
    long_run.wait()
    time.sleep(0.2)
    assert len(list(tmp_path.glob("fp8tune-*"))) == 2
    compared(repository, "main..main", "same")
    assert not list(tmp_path.glob("fp8tune-*"))
