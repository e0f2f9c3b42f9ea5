"""Versions, commands and package contents agree across the project's files."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from database_rows import config, finished_sweep, problem
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from places import ROOT

import fp8tune
from fp8tune.store.results import Store


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_all_files_name_one_version() -> None:
    newest = re.search(r"^## (\d\S+)", text("CHANGELOG.md"), re.MULTILINE)
    assert newest is not None
    versions = [
        tomllib.loads(text(name))["project"]["version"] for name in ("pyproject.toml", "kernels/pyproject.toml")
    ]
    assert [*versions, fp8tune.__version__] == [newest[1]] * 3


def test_ci_runs_the_commands_of_the_pages() -> None:
    workflow, script = text(".github/workflows/ci.yml"), text(".ci/run")
    commands = re.findall(r"^    (pip install -c.*)$", text("README.md"), re.MULTILINE)
    assert len(commands) == 2
    assert all(command in workflow for command in commands)
    install, test = commands[1].split(" && ")
    assert install.removeprefix("pip install ") in script
    assert f"step {test}\n" in script
    assert commands[1] in text("CONTRIBUTING.md")


def pins(name: str) -> dict[str, SpecifierSet]:
    """Distribution -> what a constraints file says of its version."""
    lines = (line.partition("#")[0].strip() for line in text(name).splitlines())
    return {requirement.name: requirement.specifier for requirement in map(Requirement, filter(None, lines))}


COMBINATIONS = {
    path.stem.removeprefix("torch-"): f"constraints/{path.name}" for path in (ROOT / "constraints").iterdir()
}
"""Version of torch -> constraints with it."""


def pinned(name: str, distribution: str) -> Version:
    (specifier,) = pins(name)[distribution]
    assert specifier.operator == "=="
    return Version(specifier.version)


def test_constraints_are_what_the_packages_allow_and_reach_both_ends() -> None:
    for project in ("pyproject.toml", "kernels/pyproject.toml"):
        declared = tomllib.loads(text(project))["project"]
        allowed = {item.name: item.specifier for item in map(Requirement, declared["dependencies"])}
        for name in COMBINATIONS.values():
            assert pinned(name, "torch") in allowed["torch"], name
            assert pinned(name, "triton") in allowed["triton"], name
        minors = {pinned(name, "triton").minor for name in COMBINATIONS.values()}
        assert minors == {minor for minor in range(100) if Version(f"3.{minor}") in allowed["triton"]}
    assert all(f"{pinned(name, 'torch')}".startswith(f"{torch}.") for torch, name in COMBINATIONS.items())
    of_ci = pinned("constraints.txt", "torch")
    assert pinned("constraints.txt", "triton") == pinned(COMBINATIONS[f"{of_ci.major}.{of_ci.minor}"], "triton")


def test_ci_installs_each_combination_on_each_python() -> None:
    declared = tomllib.loads(text("pyproject.toml"))["project"]
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(declared["classifiers"]))
    matrices = [
        job["strategy"]["matrix"]
        for workflow in ("ci", "package")
        for job in yaml.safe_load(text(f".github/workflows/{workflow}.yml"))["jobs"].values()
        if "strategy" in job
    ]
    assert [matrix["python"] for matrix in matrices] == [pythons, pythons]
    assert matrices[1]["torch"] == sorted(COMBINATIONS)
    versions = [pinned(name, "triton") for name in COMBINATIONS.values()]
    oldest, newest = (f"{version.major}.{version.minor}" for version in (min(versions), max(versions)))
    sentence = f"Python {pythons[0]} or newer, PyTorch {min(COMBINATIONS)} or newer and Triton {oldest} to {newest}"
    assert sentence in " ".join(text("README.md").split())


def test_constraints_have_the_versions_of_the_committed_rows() -> None:
    connection = sqlite3.connect(f"file:{ROOT / 'results.db'}?mode=ro&immutable=1", uri=True)
    timed = connection.execute("SELECT DISTINCT torch, triton FROM devices WHERE torch != ''").fetchall()
    connection.close()
    oldest, newest = COMBINATIONS[min(COMBINATIONS)], COMBINATIONS[max(COMBINATIONS)]
    assert {torch.partition("+")[0] for torch, _ in timed} == {str(pinned(oldest, "torch"))}
    assert {triton for _, triton in timed} == {str(pinned(names, "triton")) for names in (oldest, newest)}


# Packages


def build(source: Path, target: str, folder: Path) -> Path:
    """Build a wheel or an sdist without the network, and return its path."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (package,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return package


def installed(wheel: Path, site: Path) -> tuple[set[str], str]:
    """Extract a wheel; return the names of its files and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    return names, metadata


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of the tree's copy that has a small database and the files of somebody at work."""
    tree = tmp_path_factory.mktemp("tree") / "fp8tune"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "*.db*", "__pycache__", "build", "dist"))
    shutil.copy(ROOT / ".gitignore", tree)
    with Store.open(str(tree / "results.db"), create=True) as store:
        finished_sweep(store, {problem(): {config(32): 100.0, config(64): 120.0}})
    for stray in ("fp8tune.db", "fp8tune/mine.db-wal", "results.db.saved", "build/docs/index.html", ".venv/pyvenv.cfg"):
        (tree / stray).parent.mkdir(parents=True, exist_ok=True)
        (tree / stray).write_text("stray")
    return build(tree, "sdist", tmp_path_factory.mktemp("sdist"))


def test_packages_have_all_files_and_work_elsewhere(sdist: Path, tmp_path: Path) -> None:
    for folder in ("source", "wheel", "kernels", "site", "empty"):
        (tmp_path / folder).mkdir()
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    in_sdist = {str(path.relative_to(source)) for path in source.rglob("*")}
    assert {"README.md", "tests/docs/test_project_files.py", "sweeps/llama4.toml", "docs/README.md"} <= in_sdist
    assert [path for path in in_sdist if ".db" in path or path.startswith(("build", ".venv", ".ci"))] == ["results.db"]

    in_wheel, metadata = installed(build(source, "wheel", tmp_path / "wheel"), tmp_path / "site")
    assert {path.partition("/")[0] for path in in_wheel if ".dist-info/" not in path} == {"fp8tune"}
    in_kernels, _ = installed(build(ROOT / "kernels", "wheel", tmp_path / "kernels"), tmp_path / "site")
    # not `kernels`: that package belongs to Hugging Face, and installing over it would break it
    assert {path.partition("/")[0] for path in in_kernels if ".dist-info/" not in path} == {
        "fp8tune_kernels",
        "fp8tune_kernels.pth",
    }
    assert "fp8tune_kernels/py.typed" in in_kernels
    shape_sets = {f"fp8tune/_sweeps/{path.name}" for path in (ROOT / "sweeps").glob("*.toml")}
    data = {"fp8tune/py.typed", "fp8tune/report/assets/page.js"}
    assert shape_sets | data | {"fp8tune/_sweeps/published/kernels.csv"} <= in_wheel
    assert [path for path in in_wheel if ".db" in path] == ["fp8tune/_results.db"]

    targets = re.findall(r'(?:\]\(|(?:src|srcset|href)=")([^)"]+)', metadata)
    assert len(targets) > 10
    assert all(target.startswith(("https://", "#")) for target in targets)
    assert "## Installation" in metadata
    assert "## Documentation" in metadata
    assert "git clone" not in metadata  # for contributors

    variables = {name: value for name, value in os.environ.items() if name not in ("FP8TUNE_DB", "FP8TUNE_BASE")}
    empty = tmp_path / "empty"
    variables |= {"PYTHONPATH": str(tmp_path / "site"), "HOME": str(empty), "XDG_DATA_HOME": str(empty / "data")}
    command = [sys.executable, "-m", "fp8tune", "show", "colwise", "--format", "json"]
    done = subprocess.run(command, cwd=empty, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"time_us": 100.0' in done.stdout
    assert list(empty.iterdir()) == []  # reading creates no database
