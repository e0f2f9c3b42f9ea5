"""Kernels that packages register under the entry-point group ``fp8tune.kernels``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8tune import registry
from fp8tune.replay.loading import load_spec
from fp8tune.revisions import source
from fp8tune_kernels import catalog

SPEC = """
from dataclasses import replace
from fp8tune_kernels.quantize.rowwise_2d import SPEC as OTHER
SPEC = replace(OTHER, name="other-kernel")
"""


def test_the_kernels_of_the_catalog_are_registered() -> None:
    assert tuple(registry.kernels()) == catalog.KERNELS
    for name, path in registry.kernels().items():
        assert path == f"{catalog.module_name(name)}:SPEC"


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put a package on the path whose metadata registers a kernel."""
    (tmp_path / "other_kernels.py").write_text(SPEC)
    info = tmp_path / "other_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-kernels\nVersion: 1.0\n")
    points = f"[{registry.KERNELS}]\nother-kernel = other_kernels:SPEC\ngone = fp8tune_kernels.gone:SPEC\n"
    (info / "entry_points.txt").write_text(points)  # the second as metadata of an older checkout has it
    monkeypatch.syspath_prepend(tmp_path)
    registry.kernels.cache_clear()
    yield
    registry.kernels.cache_clear()


@pytest.mark.usefixtures("other_package")
def test_a_kernel_of_another_package_is_known_by_its_name() -> None:
    assert list(registry.kernels())[-1] == "other-kernel"
    assert load_spec("other-kernel").name == "other-kernel"
    assert len(source.source_hash("other-kernel")) == 16
    assert len(source.declaration_hash("other-kernel")) == 16
