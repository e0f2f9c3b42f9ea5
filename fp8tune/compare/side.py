"""What a worker does for one side of a comparison: load the kernels of its checkout, survey, compile, check, time.

Workers are forked from a server that has torch and Triton but no kernel. A worker takes the kernels of one checkout,
once; only the module that kernels and tuner speak through, ``fp8tune_kernels.spec``, stays the tuner's own.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import fp8tune_kernels
from fp8tune.compare.binaries import launched_code
from fp8tune.errors import UsageError
from fp8tune.measure import trial as measure
from fp8tune.measure.device import limits
from fp8tune.plan import problems as plan
from fp8tune.records import Device, NamedInts, Outcome, Problem
from fp8tune.revisions.loading import load_spec
from fp8tune_kernels.spec import KernelSpec

P = ParamSpec("P")
T = TypeVar("T")

KERNELS = "fp8tune_kernels"


@dataclass(frozen=True)
class Side:
    """A checkout to take kernels from, and where their binaries are kept apart from the other side's."""

    name: str
    """As the user gave the revision: for messages."""
    folder: Path
    cache: Path
    roots: tuple[str, ...] = ("",)
    """Folders below ``folder`` that packages are imported from, the first one first."""


@dataclass(frozen=True)
class Survey:
    """A kernel as one side declares it."""

    kernel: str
    default: NamedInts
    axes: tuple[tuple[str, tuple[int, ...]], ...]
    configs: dict[Problem, NamedInts]
    """What users of this side get for each problem: its exported table's config, else its declared default."""


@dataclass(frozen=True)
class Plan:
    """Which problems are wanted of a kernel."""

    rows: tuple[NamedInts, ...]
    routing: str
    fp8_dtype: str
    scale_mode: str | None
    seed: int
    arch: str
    device: str
    """The device's name: a table may have rows of its own for it."""


def within(side: Side, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a worker that has taken, or takes now, the kernels of ``side``."""
    _take(side)
    return function(*args, **kwargs)


_taken: Side | None = None


def _take(side: Side) -> None:
    global _taken
    if _taken == side:
        return
    if _taken is not None:
        raise RuntimeError(f"this process has the kernels of {_taken.name}: {side.name} needs one of its own")
    _taken = side
    side.cache.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = os.environ["TMPDIR"] = str(side.cache)
    tempfile.tempdir = None  # what it gave before is forgotten: files of a compiler that is killed go with the cache
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    roots = [side.folder / root for root in side.roots]
    sys.path[:0] = [str(root) for root in roots]
    own = [str(root / KERNELS) for root in roots if (root / KERNELS).is_dir()]
    if own:
        fp8tune_kernels.__path__ = own
        for name in [name for name in sys.modules if name.startswith(f"{KERNELS}.") and name != f"{KERNELS}.spec"]:
            del sys.modules[name]
            vars(fp8tune_kernels).pop(name.removeprefix(f"{KERNELS}."), None)


# What the worker is asked


def survey(reference: str, wanted: Plan) -> Survey:
    """The kernel's problems and configs. Raises UsageError where it does not load, or not from the checkout."""
    spec = _spec(reference)
    problems = plan.problems(
        spec,
        wanted.rows,
        routing=wanted.routing,
        fp8_dtype=wanted.fp8_dtype,
        scale_mode=wanted.scale_mode,
        seed=wanted.seed,
    )
    axes = tuple((name, tuple(values)) for name, values in spec.axes.items())
    return Survey(spec.name, spec.default, axes, {p: _exported(spec, p, wanted) for p in problems})


def code(reference: str, problem: Problem, config: NamedInts, arch: str) -> str:
    """Compile for ``arch`` into the side's cache; the hash of what runs there."""
    return launched_code(reference, problem, config, arch)


def check(reference: str, problem: Problem, config: NamedInts, torch_device: str) -> Outcome:
    """Every byte against the side's own reference, on the problem and on the edges it declares. Times nothing.

    A checkout from before specs had edges declares none.
    """
    return measure.run_trial(reference, problem, config, "none", torch_device, 0)


def candidates(reference: str, problem: Problem, device: Device, count: int) -> list[NamedInts]:
    """Configs of the side's grid that are worth trying there: the default first, then a seeded choice."""
    spec = _spec(reference)
    trials = plan.trials(spec, problem, spec.axes, limits(device))
    default, *others = [trial.config for trial in trials if trial.pruned is None]
    return [default, *random.Random(problem.seed).sample(others, min(len(others), count - 1))]


def _spec(reference: str) -> KernelSpec:
    """The spec, if it is the checkout's own: an installed package of the same name would compare code with itself."""
    spec = load_spec(reference)
    assert _taken is not None
    files = {_file(function) for function in (spec.launch, spec.reference, spec.inputs)}
    if not any(file.resolve().is_relative_to(_taken.folder.resolve()) for file in files):
        raise UsageError(f"{reference} comes from {min(files)}, not from the checkout of {_taken.name}: check --repo")
    return spec


def _file(function: Callable[..., Any]) -> Path:
    module = sys.modules.get(getattr(function, "__module__", ""))
    return Path(getattr(module, "__file__", None) or "")


def _exported(spec: KernelSpec, problem: Problem, wanted: Plan) -> NamedInts:
    try:
        lookup: Any = importlib.import_module(f"{KERNELS}.runtime.lookup")
    except ModuleNotFoundError:  # a checkout from before the kernels' package had folders
        lookup = importlib.import_module(f"{KERNELS}.lookup")
    key = spec.lookup_key(problem)
    return NamedInts(lookup.pick(spec, key, lookup.table(wanted.arch), wanted.device))
