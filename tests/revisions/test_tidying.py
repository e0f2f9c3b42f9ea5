"""Tidying the kernels of this package orphans no row: a helper renamed, a module moved, a file split."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import fp8tune
from database_rows import H100, begin
from database_rows import row as stored_row

import fp8tune_kernels
from fp8tune.check import tables
from fp8tune.check.doctor import timed_sources
from fp8tune.records import KernelVersion, NamedInts, Problem
from fp8tune.revisions import source
from fp8tune.store.results import Store

KERNEL = "rowwise-2d"
KERNELS = (KERNEL, "colwise-3d", "mxfp8-dim0")
"""Its own, one that launches the same function, and one with other arithmetic."""

HELPER = "_tile_width"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The kernels as they are, in a folder that they can be imported from."""
    original = Path(next(iter(fp8tune_kernels.__path__)))
    shutil.copytree(original, tmp_path / "fp8tune_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def rename_a_helper(package: Path) -> None:
    replace_everywhere(package / "quantize", rf"\b{HELPER}\b", "_columns_of_a_tile")


def move_a_module(package: Path) -> None:
    room = package / "quantize"
    (room / "arithmetic.py").rename(moved := package / "rounding.py")
    moved.write_text(moved.read_text().replace("from ..", "from ."))
    replace_everywhere(room, r"from \.arithmetic import", "from ..rounding import")
    replace_everywhere(package, r"from \.\.quantize\.arithmetic import", "from ..rounding import")


def split_a_file(package: Path) -> None:
    whole, part = package / "quantize" / "rowwise_2d.py", package / "quantize" / "rowwise_2d_width.py"
    text = whole.read_text()
    (helper,) = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == HELPER]
    moved = ast.get_source_segment(text, helper)
    assert moved
    part.write_text(f"from __future__ import annotations\n\nfrom collections.abc import Mapping\n\n\n{moved}\n")
    imported = f"from fp8tune_kernels.quantize.rowwise_2d_width import {HELPER}\n"
    whole.write_text(text.replace(moved, "").replace("\nimport torch\n", f"\nimport torch\n{imported}", 1))


def replace_everywhere(folder: Path, pattern: str, new: str) -> None:
    texts = {path: path.read_text() for path in folder.rglob("*.py")}
    changed = {path: re.sub(pattern, new, text) for path, text in texts.items() if re.search(pattern, text)}
    assert changed
    for path, text in changed.items():
        path.write_text(text)


def change_a_constant(package: Path) -> None:
    replace_everywhere(package / "quantize", r"float32_bits\(1e-12\)", "float32_bits(1e-11)")


def hashes(folder: Path) -> dict[str, str]:
    return {kernel: source.source_hash(kernel, source.in_folder(folder)) for kernel in KERNELS}


@pytest.mark.parametrize("tidy", [rename_a_helper, move_a_module, split_a_file])
def test_kernels_keep_their_hashes(copy: Path, tidy: Callable[[Path], None]) -> None:
    before = hashes(copy)
    tidy(copy / "fp8tune_kernels")
    assert hashes(copy) == before


def test_all_rows_still_count(copy: Path, tmp_path: Path) -> None:
    version = KernelVersion(KERNEL, hashes(copy)[KERNEL], NamedInts(BLOCK_SIZE=1), (("BLOCK_SIZE", (1, 2)),), ("K",))
    problem, database = Problem(KERNEL, NamedInts(M=16640, K=5120, G=1)), tmp_path / "rows.db"
    with Store.open(str(database), create=True) as store:
        sweep = begin(store, H100)
        for block in (1, 2):
            store.add(sweep, stored_row(90.0 + block, of=problem, config=NamedInts(BLOCK_SIZE=block), version=version))
        store.finish_sweep(sweep)
    before = json.loads(fp8tune(*asked(database)).stdout)  # of the kernels as they are
    for tidy in (move_a_module, split_a_file, rename_a_helper):
        tidy(copy / "fp8tune_kernels")
    assert shown(copy, database) == before
    assert [row["n"] for row in before] == [1]
    assert judged(copy, database) == f"{KERNEL}: timed as its code is now"


def test_a_changed_constant_is_other_code(copy: Path) -> None:
    before = hashes(copy)
    change_a_constant(copy / "fp8tune_kernels")
    after = hashes(copy)
    assert [kernel for kernel in KERNELS if before[kernel] == after[kernel]] == ["mxfp8-dim0"]


def shown(kernels: Path, database: Path) -> list[dict[str, object]]:
    """What ``fp8tune show`` says, with the kernels of that folder."""
    done = subprocess.run(
        [sys.executable, "-m", "fp8tune", *asked(database)],
        env={**os.environ, "PYTHONPATH": str(kernels)},
        capture_output=True,
        check=True,
        text=True,
    )
    rows: list[dict[str, object]] = json.loads(done.stdout)
    return rows


def asked(database: Path) -> list[str]:
    return ["show", "--kernel", KERNEL, "--format", "json", "--db", str(database)]


def judged(kernels: Path, database: Path) -> str:
    with Store.open(str(database), writable=False) as store:
        (finding,) = tables.check_sources(timed_sources(store.pools()), {KERNEL: hashes(kernels)[KERNEL]})
    return finding.what
