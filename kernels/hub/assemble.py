"""Write the Hugging Face kernel: ``python kernels/hub/assemble.py FOLDER``.

FOLDER becomes a project of ``kernel-builder``, which builds and uploads it, with ``build/torch-cpu`` and
``build/torch-cuda`` already built: ``kernels.get_local_kernel(FOLDER)`` loads them. The sources are those of
fp8tune-kernels, without what needs other packages. Their operators take the namespace of the build, so that two builds
can be loaded into one process.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "fp8tune_kernels"
LEFT_OUT = shutil.ignore_patterns("__pycache__", "torchtitan.py", "transformers_experts")

NAMESPACE = 'NAMESPACE = "fp8tune"\n'
OF_THE_BUILD = 'NAMESPACE = add_op_namespace_prefix("").removesuffix("::")\n'
IMPORT = "from .launching import replayed\n"

OPS = '''\
"""Namespace of this build's operators."""

import torch

ops = torch.ops.{id}


def add_op_namespace_prefix(name: str) -> str:
    """Return the full name of an operator."""
    return f"{id}::{{name}}"
'''


def assemble(folder: Path) -> None:
    """Write the project and its builds into a folder that does not exist or is empty."""
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("__pycache__", "assemble.py"), dirs_exist_ok=True)
    (folder / "tests" / "__init__.py").touch()
    general = tomllib.loads((HERE / "build.toml").read_text())["general"]
    name = general["name"].replace("-", "_")
    sources = folder / "torch-ext" / name
    shutil.copytree(PACKAGE, sources, ignore=LEFT_OUT)
    shutil.copy(HERE.parents[1] / "LICENSE", sources)
    operators = sources / "runtime" / "ops.py"
    text = operators.read_text()
    if text.count(NAMESPACE) != 1 or text.count(IMPORT) != 1:
        raise SystemExit(f"{operators}: expected the lines {NAMESPACE!r} and {IMPORT!r} once")
    imported = f"from .._ops import add_op_namespace_prefix\n{IMPORT}"
    operators.write_text(text.replace(NAMESPACE, OF_THE_BUILD).replace(IMPORT, imported))
    for backend in general["backends"]:
        build(sources, folder / "build" / f"torch-{backend}", general, name, backend)


def build(sources: Path, variant: Path, general: dict[str, str], name: str, backend: str) -> None:
    """Write what ``kernel-builder`` would for one backend: sources, the operators' namespace, and metadata."""
    shutil.copytree(sources, variant)
    revision = hashlib.sha256("".join(digests(variant).values()).encode()).hexdigest()[:7]
    identifier = f"_{name}_{backend}_{revision}"
    (variant / "_ops.py").write_text(OPS.format(id=identifier))
    metadata = {
        "id": identifier,
        **{key: general[key] for key in ("name", "version", "license", "upstream")},
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digests(variant)},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def digests(folder: Path) -> dict[str, str]:
    """Map each file's path to its SHA-256 in base64."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in files
    }


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    assemble(Path(sys.argv[1]))
