"""Copies of kernels with a fault in them, as files: for a test's own process, for workers, and for a GPU."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fp8tune_kernels
from fp8tune_kernels import catalog
from fp8tune_kernels.spec import KernelSpec


def plant(kernel: str, folder: Path, modules: Sequence[str] = (), *changes: str) -> list[Path]:
    """Write a copy of a kernel's file with a fault: there, or in the last of ``modules``, each of which is copied as
    well and imports the next. ``changes``: right words and the wrong ones in their place, in turn. Returns the files in
    the order to import them: the kernel's own is the last."""
    files = [catalog.module_name(kernel), *map(full_name, modules)]
    name = f"planted_{folder.name}"
    text = source(files.pop())
    for right, wrong in zip(changes[::2], changes[1::2], strict=True):
        text = faulty(text, right, wrong)
    written = []
    for module, importer in zip(reversed(modules), reversed(files), strict=True):
        written.append(folder / f"{name}_{module}.py")
        written[-1].write_text(text)
        text = importing(source(importer), module, f"{name}_{module}")
    written.append(folder / f"{name}.py")
    written[-1].write_text(text)
    return written


def planted(title: str, folder: Path, *changes: str) -> KernelSpec:
    """The spec of a copy with a fault, or of one that has none, imported: ``title`` begins with the modules' names."""
    kernel, *modules = title.partition(":")[0].split(", ")
    return [load(file) for file in plant(kernel, folder, modules, *changes)][-1].SPEC  # type: ignore[no-any-return]


def load(file: Path) -> Any:
    """Import a file under its own name."""
    result = importlib.util.spec_from_file_location(file.stem, file)
    assert result is not None
    assert result.loader is not None
    module = importlib.util.module_from_spec(result)
    sys.modules[file.stem] = module
    result.loader.exec_module(module)
    return module


def plant_foreign(title: str, fault: Sequence[str], folder: Path) -> tuple[str, str]:
    """Plant a fault by its title in a copy for workers, which refuse a name of ours in another file.

    Returns the copy's name and its reference.
    """
    kernel, *modules = title.partition(":")[0].split(", ")
    file = plant(kernel, folder, modules, *fault)[-1]
    name = f"planted-{kernel}"
    file.write_text(faulty(file.read_text(), f'    name="{kernel}",', f'    name="{name}",'))
    return name, f"{file}:SPEC"


def full_name(module: str) -> str:
    """The dotted name of a module in the kernels' package, whichever folder it lies in."""
    [result] = Path(fp8tune_kernels.__file__).parent.rglob(f"{module}.py")
    return ".".join(
        ["fp8tune_kernels", *result.relative_to(Path(fp8tune_kernels.__file__).parent).with_suffix("").parts]
    )


def source(module: str) -> str:
    """Return a module's text with absolute imports, and without its operator, which can exist only once."""
    text = Path(str(importlib.util.find_spec(module).origin)).read_text()
    text = re.split(r"^\w+ = SPEC\.define\(", text, flags=re.MULTILINE)[0]

    def absolute(line: re.Match[str]) -> str:
        package = ".".join(module.split(".")[: -len(line[1])])
        return f"from {package}.{line[2]} import" if line[2] else f"from {package} import"

    return re.sub(r"^from (\.+)([\w.]*) import", absolute, text, flags=re.MULTILINE)


def faulty(text: str, right: str, wrong: str) -> str:
    """The text with the wrong words in the place of the right ones, which it must have."""
    assert right in text
    return text.replace(right, wrong) if right else text


def importing(text: str, module: str, second: str) -> str:
    """The text with another module in the place of a sibling: its names, and the sibling by its own name."""
    package = full_name(module).rpartition(".")[0]
    text = text.replace(f"from {package}.{module} import", f"from {second} import")
    line = re.search(rf"^from {package} import (.*\b{module}\b.*)$", text, re.MULTILINE)
    if line is None:
        return text
    rest = [name for name in line[1].split(", ") if name != module]
    remaining = f"from {package} import {', '.join(rest)}\n" if rest else ""
    return text.replace(line[0], f"{remaining}import {second} as {module}")
