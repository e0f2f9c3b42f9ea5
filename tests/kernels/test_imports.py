"""Calls after an import."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fp8tune_kernels.imports import AfterImport


def test_two_finders_of_one_module_both_act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may be recorded while ``FP8TUNE_PIN`` pins its kernels."""
    (tmp_path / "imported_once.py").write_text("NUMBER = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    acted: list[tuple[str, ModuleType]] = []
    for name in ("first", "second"):
        finder = AfterImport({"imported_once": lambda module, name=name: acted.append((name, module))})  # type: ignore[misc]
        monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    module = importlib.import_module("imported_once")
    assert module.NUMBER == 7
    assert sorted(name for name, _ in acted) == ["first", "second"]
    assert {id(imported) for _, imported in acted} == {id(module)}
