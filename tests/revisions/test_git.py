"""Questions to git, on real repositories."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from git_repositories import commit
from git_repositories import git as run

from fp8tune import errors
from fp8tune.revisions import git


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """main: one commit; branch: a second one; trunk moved on after the fork."""
    run(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path, {"kernel.py": "one = 1\n", "results.db": "rows"})
    run(tmp_path, "tag", "v1")
    run(tmp_path, "checkout", "-q", "-b", "branch")
    commit(tmp_path, {"kernel.py": "two = 2\n"})
    run(tmp_path, "checkout", "-q", "main")
    run(tmp_path, "commit", "-q", "--allow-empty", "-m", "three")
    return tmp_path


def test_branches_without_common_history_have_no_merge_base(repository: Path) -> None:
    run(repository, "checkout", "-q", "--orphan", "other")
    run(repository, "commit", "-q", "-m", "other")
    with pytest.raises(errors.UsageError, match=r"share no history: compare them with main\.\.other"):
        git.merge_base(repository, "main", "other")


def test_head_says_whether_code_has_changed_and_leaves_the_index_alone(repository: Path) -> None:
    """Git locks the index to write it; a process that is killed meanwhile leaves the lock."""
    commit, index = git.resolve(repository, "HEAD"), (repository / ".git" / "index").read_bytes()
    os.utime(repository / "kernel.py", (0, 0))  # git would write down that the file is unchanged
    assert git.head(repository) == commit
    assert (repository / ".git" / "index").read_bytes() == index
    (repository / "results.db").write_text("more rows")
    (repository / "untracked.py").write_text("")
    assert git.head(repository) == commit
    (repository / "kernel.py").write_text("three = 3\n")
    assert git.head(repository) == commit + "+"


def test_where_there_is_no_commit_no_repository_or_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git.head(tmp_path) == ""
    with pytest.raises(errors.MachineError, match="not a git repository"):
        git.toplevel(tmp_path)
    with pytest.raises(errors.UsageError, match="is not a folder"):
        git.toplevel(tmp_path / "missing")
    run(tmp_path, "init", "-q")
    assert git.head(tmp_path) == ""
    monkeypatch.setenv("PATH", "")
    assert git.head(tmp_path) == ""
    with pytest.raises(errors.MachineError, match="git is not installed"):
        git.toplevel(tmp_path)
