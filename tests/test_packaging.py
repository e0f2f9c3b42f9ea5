"""What is shipped: wheel and sdist hold what they should, work from anywhere, and leave other packages alone."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from database_rows import config, finished_sweep, problem
from places import ROOT

from fp8tune.plan import shapes
from fp8tune.store.results import Store

ROWS = "fp8tune/_results.db"
"""Where a wheel has the results that come with fp8tune."""

STRAYS = (
    "fp8tune.db",
    "fp8tune.db-wal",
    "fp8tune/try.db-journal",
    "results.db.saved",
    "results.db.damaged",
    "results.db.left-behind/results.db-wal",
    "docs/try.db",
    "fp8tune/mine.db",
    "results-0.2.0.db.xz",
    "build/docs/index.html",
    "dist/fp8tune-0.2.0.tar.gz",
    "fp8tune/__pycache__/cli.cpython-311.pyc",
    ".venv/pyvenv.cfg",
)
"""What lies around in a tree that somebody works in."""


def build(source: Path, target: str, into: Path) -> Path:
    """Build ``target`` (``wheel`` or ``sdist``) of a source tree, without the network."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = into.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return built


def unpacked(sdist: Path, into: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(into, filter="data")
    (tree,) = into.iterdir()
    return tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of this one with a small ``results.db``, and strays."""
    tree = tmp_path_factory.mktemp("tree") / "fp8tune"
    ignored = shutil.ignore_patterns(".*", "*.db*", "__pycache__", "build", "dist", "tests", "docs")
    shutil.copytree(ROOT, tree, ignore=ignored)
    shutil.copy(ROOT / ".gitignore", tree)
    with Store.open(str(tree / "results.db"), create=True) as store:
        finished_sweep(store, {problem(): {config(32): 100.0, config(64): 120.0}})
    for name in STRAYS:
        stray = tree / name
        stray.parent.mkdir(parents=True, exist_ok=True)
        stray.write_bytes(b"stray")
    return tree


@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory):
    return build(tree, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Built from the sdist, as pip does where it finds no wheel."""
    return build(unpacked(sdist, tmp_path_factory.mktemp("unpacked")), "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def kernels_wheel(tree, tmp_path_factory):
    return build(tree / "kernels", "wheel", tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def site(wheel, kernels_wheel, tmp_path_factory):
    """Both wheels, installed; the packages that they depend on are those of this environment."""
    site = tmp_path_factory.mktemp("site")
    for built in (wheel, kernels_wheel):
        zipfile.ZipFile(built).extractall(site)
    return site


def ran(site: Path, cwd: Path, *arguments: str) -> str:
    """What the installed fp8tune prints in a folder."""
    unset = {"FP8TUNE_DB", "FP8TUNE_BASE"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"PYTHONPATH": str(site), "HOME": str(cwd), "XDG_DATA_HOME": str(cwd / "data")}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def members(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_the_sdist_holds_the_tree_and_no_database_but_the_committed_one(sdist):
    names = members(sdist)
    assert {"LICENSE", "README.md", "pyproject.toml", "sweeps/llama4.toml", "fp8tune/cli.py"} <= names
    assert {"kernels/fp8tune_kernels/catalog.py", "fp8tune/report/assets/page.js"} <= names
    assert not names & set(STRAYS)
    assert [name for name in names if ".db" in name] == ["results.db"]


def test_the_tests_are_in_the_sdist_of_this_tree():
    from hatchling.builders.sdist import SdistBuilder

    builder = SdistBuilder(str(ROOT))
    included = {file.relative_path for file in builder.recurse_project_files()}
    assert {"tests/test_packaging.py", "docs/conf.py"} <= included
    assert not [name for name in included if ".db" in name or name.startswith(("build/", ".ci/"))]


def packages(wheel: Path) -> set[str]:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    return {top for top in tops if not top.endswith(".dist-info")}


def test_the_wheels_hold_a_package_each_and_the_tuners_has_the_sweeps_and_the_rows(wheel, kernels_wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert (packages(wheel), packages(kernels_wheel)) == ({"fp8tune"}, {"fp8tune_kernels"})
    assert {f"fp8tune/_sweeps/{name}.toml" for name in shapes.list_sets()} <= set(names)
    assert {"fp8tune/py.typed", "fp8tune/_sweeps/published/kernels.csv"} <= set(names)
    assert "fp8tune_kernels/py.typed" in zipfile.ZipFile(kernels_wheel).namelist()
    assert [name for name in names if ".db" in name] == [ROWS]


def test_a_wheel_of_the_checkout_has_the_bytes_of_one_of_the_sdist(tree, wheel, tmp_path):
    shutil.rmtree(tree / "results.db.left-behind")
    again = build(tree, "wheel", tmp_path)
    digests = [hashlib.sha256(zipfile.ZipFile(path).read(ROWS)).hexdigest() for path in (wheel, again)]
    assert digests[0] == digests[1]


def test_the_wheel_finds_its_sweeps_away_from_the_checkout(site, tmp_path):
    code = (
        "from fp8tune.plan import shapes; "
        "print(shapes.sweeps_dir(), *shapes.list_sets(), len(shapes.load('llama4').rows))"
    )
    folder, *names, rows = ran(site, tmp_path, "-c", code).split()
    assert Path(folder) == (site / "fp8tune" / "_sweeps").resolve()
    assert tuple(names) == shapes.list_sets()
    assert int(rows) == len(shapes.load("llama4").rows)


def test_show_in_an_empty_folder_reads_the_wheels_rows(site, tmp_path):
    (shown,) = json.loads(ran(site, tmp_path, "-m", "fp8tune", "show", "--kernel", "colwise", "--format", "json"))
    assert (shown["config"]["BLOCK_SIZE"], shown["time_us"]) == (32, 100.0)
    assert list(tmp_path.iterdir()) == []  # reading makes no database


def test_ci_runs_the_line_that_the_readme_gives():
    script, readme = (ROOT / ".ci" / "run").read_text(), (ROOT / "README.md").read_text()
    (line,) = [line.strip() for line in readme.splitlines() if "pytest -n" in line]
    install, test = line.split(" && ")
    assert install.removeprefix("pip install ") in script
    assert f"step {test}\n" in script
