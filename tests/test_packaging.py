"""What is shipped: wheel and sdist hold what they should, work from anywhere, and leave other packages alone."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from places import ROOT

from fp8tune.plan import shapes


def build(source: Path, target: str, into: Path) -> Path:
    """Build ``target`` (``wheel`` or ``sdist``) of a source tree, without the network."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = into.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Built from the sdist, as pip does where it finds no wheel."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (tree,) = unpacked.iterdir()
    return build(tree, "wheel", tmp_path_factory.mktemp("wheel"))


def test_the_sdist_holds_the_tree_and_no_database(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "sweeps/llama4.toml", "fp8tune/cli.py"} <= names
    assert {"kernels/fp8tune_kernels/catalog.py", "tests/test_packaging.py"} <= names
    assert not [name for name in names if name.startswith("results.db")]


def test_the_wheel_holds_two_packages_and_the_sweeps(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    # no `kernels`: that name on PyPI is Hugging Face's, and installing over it breaks theirs
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fp8tune", "fp8tune_kernels"}
    assert {f"fp8tune/_sweeps/{name}.toml" for name in shapes.list_sets()} <= set(names)
    assert {"fp8tune/py.typed", "fp8tune_kernels/py.typed", "fp8tune/_sweeps/published/kernels.csv"} <= set(names)
    assert not [name for name in names if name.endswith(".db")]


def test_the_wheel_finds_its_sweeps_away_from_the_checkout(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "from fp8tune.plan import shapes; "
        "print(shapes.sweeps_dir(), *shapes.list_sets(), len(shapes.load('llama4').rows))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": "site"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    folder, *names, rows = done.stdout.split()
    assert Path(folder) == (tmp_path / "site" / "fp8tune" / "_sweeps").resolve()
    assert tuple(names) == shapes.list_sets()
    assert int(rows) == len(shapes.load("llama4").rows)


def test_ci_runs_the_line_that_the_readme_gives():
    script, readme = (ROOT / ".ci" / "run").read_text(), (ROOT / "README.md").read_text()
    (line,) = [line.strip() for line in readme.splitlines() if "pytest -n" in line]
    install, test = line.split(" && ")
    assert install.removeprefix("pip install ") in script
    assert f"step {test}\n" in script
