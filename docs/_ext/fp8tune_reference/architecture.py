"""The layers of the code: which package may import which, and what each is for."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from fp8tune_reference.markdown import code, needed, prose, sections, table

ROOT = Path(__file__).resolve().parents[3]

SOURCES = {"fp8tune": ROOT / "fp8tune", "fp8tune_kernels": ROOT / "kernels" / "fp8tune_kernels"}
"""Package -> where it is."""


def part() -> str:
    """A table for each package, the highest layer first. Raises UndocumentedError for a module without a docstring."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    layered = [one for one in contracts if one["type"] == "layers"]
    return sections(*(_section(one["containers"][0], one["layers"]) for one in layered))


def _section(package: str, layers: list[str]) -> str:
    rows = [row for number, layer in enumerate(layers) for row in _rows(package, layer, len(layers) - number)]
    return sections(f"## `{package}`", table(["layer", "module", "what it does"], rows))


def _rows(package: str, layer: str, number: int) -> Iterator[tuple[str, ...]]:
    for name in layer.split(" | "):
        yield str(number), code(name), prose(needed(_first_paragraph(SOURCES[package] / name), f"{package}.{name}"))


def _first_paragraph(path: Path) -> str:
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0]
