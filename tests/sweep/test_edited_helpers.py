"""Sweeps after an edit of a helper outside the kernel's own package: old verdicts do not stand."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from forked import ended

KERNEL = """
import torch
from fp8tune_kernels.spec import KernelSpec, NamedInts
from beside import first
from installed import second
from space.part import third


def launch(config, values, out):
    out[0].copy_(third(second(first(values[0]))))


SPEC = KernelSpec(
    name="edited",
    axes={"BLOCK": (1, 2)},
    default=NamedInts(BLOCK=1),
    key=("n", "in_dtype"),
    problems=lambda row: iter([NamedInts(n=row["n"])]),
    inputs=lambda problem, device: (torch.ones(problem.shape["n"], device=device),),
    outputs=lambda x: (torch.empty_like(x),),
    launch=launch,
    reference=lambda x: (x + 3,),
    in_dtypes=("float32",),
)
"""
HELPERS = {"work/beside.py": "first", "site/installed/__init__.py": "second", "site/space/part.py": "third"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {"work/ops.py": KERNEL, "work/rows.toml": "[[rows]]\nn = 64\n"}
    files |= {path: f"def {name}(x):\n    return x + 1\n" for path, name in HELPERS.items()}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    return tmp_path


def test_a_sweep_after_an_edit_looks_again(folder: Path) -> None:
    def sweep() -> str:
        arguments = ("sweep", "--kernel", "ops:SPEC", "--shapes", "rows.toml", "--db", "own.db")
        return ended(*arguments, cwd=folder / "work").stdout

    assert "2 right, 0 wrong" in sweep()
    for path, name in HELPERS.items():
        text = (folder / path).read_text()
        # of another length: bytecode of a text as long, written within the same second, would count as current
        (folder / path).write_text(f"def {name}(x):\n    return x + 1 + 1\n")
        assert "0 right, 2 wrong" in sweep(), path
        (folder / path).write_text(text)
    assert "2 right, 0 wrong" in sweep()
