"""Comparing across the commit that moved the kernels of this package into folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from database_rows import study_of
from git_repositories import commit, git
from places import PLANTED

from fp8tune.comparing import live, recorded
from fp8tune.comparing.comparison import Comparison
from fp8tune.comparing.options import CompareOptions
from fp8tune.comparing.sides import sides
from fp8tune.measure.backends.simulated import SimulatedBackend
from fp8tune.records import Device, KernelVersion, Kind, NamedInts, Problem, Status
from fp8tune.revisions import source
from fp8tune.stats.study import Study

CATALOG = """
import importlib
def load(kernel):
    return importlib.import_module(f"fp8tune_kernels.{FOLDER}{kernel}").SPEC
"""
LOOKUP = """
def table(arch):
    return ()
def pick(spec, key, table, device):
    return spec.default
"""
CONFIG = NamedInts(BLOCK_SIZE=64, num_warps=4)


def package(folder: str, runtime: str, toll: float = 1.0, times: str = "2") -> Mapping[str, str]:
    """The files of ``fp8tune_kernels``, with kernels and lookup in folders of their own ("": beside each other)."""
    text = (
        (PLANTED / "versioned.py")
        .read_text()
        .replace('"versioned"', '"colwise"')
        .replace("TOLL = 1.0", f"TOLL = {toll}")
    )
    module = f"fp8tune_kernels.{folder}arithmetic".replace("/", ".")
    return {
        "__init__.py": "",
        "catalog.py": CATALOG.replace("{FOLDER}", folder.replace("/", ".")),
        f"{folder}__init__.py": "",
        f"{folder}arithmetic.py": f"TIMES = {times}\n",
        f"{folder}colwise.py": text.replace("FACTOR = 2", f"from {module} import TIMES").replace("FACTOR", "TIMES"),
        f"{runtime}__init__.py": "",
        f"{runtime}lookup.py": LOOKUP,
    }


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tags: ``old`` has all modules beside each other, ``new`` has folders, ``slower`` a change in the new layout."""
    repository = tmp_path_factory.mktemp("repository")
    git(repository, "init", "-q")
    (repository / "one.toml").write_text("[[rows]]\nM = 300\nK = 64\nE = 1\n")
    for tag, files in (
        ("old", package("", "")),
        ("new", package("quantize/", "runtime/")),
        ("slower", package("quantize/", "runtime/", toll=1.05, times="2.0")),
    ):
        commit(repository, {f"kernels/fp8tune_kernels/{name}": text for name, text in files.items()}, tag)
        git(repository, "tag", tag)
        git(repository, "rm", "-rq", "kernels")
    return repository


def compared(repository: Path, revisions: str) -> Comparison:
    options = CompareOptions(
        revisions=revisions,
        repository=repository,
        kernels=("colwise",),
        shapes=(str(repository / "one.toml"),),
        blind=True,
    )
    *_, last = live.compare(options, SimulatedBackend("simulated:1"))
    assert isinstance(last, Comparison)
    return last


@pytest.mark.parametrize(
    ("revisions", "verdict"),
    [("old..new", "CLEAR"), ("new..old", "CLEAR"), ("old..slower", "REGRESSION"), ("slower..old", "IMPROVEMENT")],
)
def test_each_side_loads_its_kernels_from_where_they_are_there(repository: Path, revisions: str, verdict: str) -> None:
    (row,) = compared(repository, revisions).rows
    assert (row.kernel, str(row.verdict), row.before_config) == ("colwise", verdict, CONFIG)


def test_recorded_rows_belong_to_both_layouts(repository: Path) -> None:
    def swept(revision: str, time_us: float) -> Study:
        found = source.source_hash("colwise", source.at_commit(repository, revision))
        version = KernelVersion("colwise", found, CONFIG, (("BLOCK_SIZE", (64,)), ("num_warps", (4,))))
        problem, device = Problem("colwise", NamedInts(M=300, K=64)), Device("sm_90")
        return study_of(problem, CONFIG, device, Kind.MEASURED, Status.OK, (time_us,), version)

    rows = [swept("old", 100.0), swept("slower", 50.0)]
    (same,) = recorded.compare(rows, sides(repository, "old..new", ["colwise"])).rows
    assert (str(same.verdict), same.before_us, same.after_us) == ("SAME-CODE", 100.0, 100.0)
    (changed,) = recorded.compare(rows, sides(repository, "old..slower", ["colwise"])).rows
    assert changed.ratio == 0.5
