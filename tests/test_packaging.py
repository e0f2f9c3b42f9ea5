"""What is shipped: wheel and sdist hold what they should, work from anywhere, and leave other packages alone."""

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import hatchling
import pytest
from database_rows import config, finished_sweep, problem
from places import ROOT

from fp8tune.adapter import read_studies
from fp8tune.plan import shapes
from fp8tune.store.results import Store

ROWS = "fp8tune/_results.db"
"""Where a wheel and an sdist have the rows that come with fp8tune."""

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

LARGEST_ROWS = 5_000_000
"""Bytes of the rows in a wheel, which compresses its files."""


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
def site(wheel, tmp_path_factory):
    """The wheel, installed; what it depends on is this environment's."""
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)
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


def test_the_sdist_holds_the_tree_and_no_database_but_the_reduced_one(sdist):
    names = members(sdist)
    assert {"LICENSE", "README.md", "pyproject.toml", "hatch_build.py", "sweeps/llama4.toml", "fp8tune/cli.py"} <= names
    assert {"kernels/fp8tune_kernels/catalog.py", "fp8tune/report/assets/page.js"} <= names
    assert not names & set(STRAYS)
    assert [name for name in names if ".db" in name] == [ROWS]


def test_the_tests_are_in_the_sdist_of_this_tree():
    from hatchling.builders.sdist import SdistBuilder

    builder = SdistBuilder(str(ROOT))
    included = {file.relative_path for file in builder.recurse_project_files()}
    assert {"tests/test_packaging.py", "docs/conf.py"} <= included
    assert not [name for name in included if ".db" in name or name.startswith(("build/", ".ci/"))]


def test_the_wheel_holds_two_packages_the_sweeps_and_the_rows(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    # no `kernels`: that name on PyPI is Hugging Face's, and installing over it breaks theirs
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fp8tune", "fp8tune_kernels"}
    assert {f"fp8tune/_sweeps/{name}.toml" for name in shapes.list_sets()} <= set(names)
    assert {"fp8tune/py.typed", "fp8tune_kernels/py.typed", "fp8tune/_sweeps/published/kernels.csv"} <= set(names)
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


def test_an_editable_installation_reads_results_db_itself(tree, tmp_path):
    command = "from hatchling.build import build_editable; print(build_editable(r'{}'))"
    subprocess.run([sys.executable, "-c", command.format(tmp_path)], cwd=tree, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if ".db" in name]


def test_the_rows_are_reduced_without_the_packages_that_fp8tune_needs(tree, tmp_path):
    code = f"""
import sys, pathlib
sys.path += [".", {str(Path(hatchling.__file__).parents[1])!r}]
import hatch_build
hatch_build.reduce(pathlib.Path("results.db"), pathlib.Path({str(tmp_path / "rows.db")!r}))
assert not {{"sqlalchemy", "torch", "fp8tune"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-I", "-c", code], cwd=tree, check=True)
    assert picks(tmp_path / "rows.db") == picks(tree / "results.db") != []


def test_what_a_damaged_database_needs_is_said_in_one_line(tree, tmp_path):
    damaged = shutil.copytree(tree, tmp_path / "tree")
    (damaged / "results.db").write_bytes(b"SQLite format 3\0" + bytes(5000))
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=damaged, capture_output=True, text=True)
    assert done.returncode == 1
    assert "fp8tune doctor --repair" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_committed_rows_come_small_without_samples_and_with_the_same_picks(tmp_path):
    """Of the smallest kernel that was swept on two devices: each is ranked in the same way."""
    committed, rows = ROOT / "results.db", tmp_path / "rows.db"
    before = committed.stat().st_mtime_ns
    hatch_build().reduce(committed, rows)
    assert committed.stat().st_mtime_ns == before
    assert len(zlib.compress(rows.read_bytes(), 1)) < LARGEST_ROWS
    with contextlib.closing(sqlite3.connect(rows)) as connection:
        assert connection.execute("SELECT count(*) FROM trials WHERE samples != x''").fetchone() == (0,)
    assert picks(rows, "colwise-transpose-3d") == picks(committed, "colwise-transpose-3d") != []


def test_packed_trials_lose_the_same_columns():
    """The bytes are those that fp8tune.store.packing describes: a line of columns, then the bytes of each."""
    kept = [["trials.id", "d", 0, 1, 3, 0, None], b"\x0a\x02\x06"], [["trials.status", "c", 0, 0, 3, 0, ["ok"]], b""]
    gone = (
        [["candidates.compile_s", "r", 0, 8, 2, 3, None], b"\x40" + bytes(16)],
        [
            ["trials.tick_us", "f", 6, 2, 1, 3, None],
            b"\xa0\x01\x02",
        ],
    )

    def packed(*columns):
        line = json.dumps([head for head, _ in columns], separators=(",", ":")).encode() + b"\n"
        return zlib.compress(line + b"".join(body for _, body in columns), 9)

    left = hatch_build().without_left_out(packed(gone[0], kept[0], gone[1], kept[1]))
    assert left == packed(*kept)


def hatch_build():
    """The build hook's module, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def picks(path, kernel=None):
    with Store.open(str(path), writable=False) as store:
        studies = read_studies(store, kernel)
    return [(study.problem, study.device, study.pick.config, study.choice.time_us) for study in studies]


def test_ci_runs_the_line_that_the_readme_gives():
    script, readme = (ROOT / ".ci" / "run").read_text(), (ROOT / "README.md").read_text()
    (line,) = [line.strip() for line in readme.splitlines() if "pytest -n" in line]
    install, test = line.split(" && ")
    assert install.removeprefix("pip install ") in script
    assert f"step {test}\n" in script
