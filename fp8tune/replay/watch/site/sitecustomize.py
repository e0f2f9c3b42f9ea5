"""Wait for Triton in each process under ``fp8tune record``, and patch it. Python runs this file first.

Then runs the file of this name that Python would have run otherwise. Imports nothing but the standard library.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))

PATCHED = {
    "triton.runtime.autotuner": "patch_autotuner",
    "triton.runtime.interpreter": "patch_bare",
    "torch._higher_order_ops.triton_kernel_wrap": "patch_torch_compile",
}
"""Module -> the function of fp8tune.replay.watch.patches that is called when it has been imported."""


class _Waiting:
    """Finder of these modules, which patches each after its code has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in PATCHED:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def patched(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            try:
                _load("fp8tune", os.path.join(_PACKAGE, "__init__.py"))
                for part in ("tuners", "pinning"):  # without the package, which the program may have
                    path = os.path.join(os.environ["FP8TUNE_RECORD_KERNELS"], f"{part}.py")
                    _load(f"fp8tune_kernels.{part}", path)
                from fp8tune.replay.watch import patches

                getattr(patches, PATCHED[name])(module)
            except Exception as error:  # the program goes on, unrecorded
                print(f"fp8tune: process {os.getpid()} is not recorded: {error!r}", file=sys.stderr)

        loader.exec_module = patched
        return spec


def _load(name: str, path: str) -> None:
    """Make a part of this fp8tune importable, but nothing else that lies beside it.

    The program's environment may have none, or another version, whose recordings the command could not read.
    """
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _run_the_users_own() -> None:
    paths = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("FP8TUNE_RECORD"):
    sys.meta_path.insert(0, _Waiting())
_run_the_users_own()
