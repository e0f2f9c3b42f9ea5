"""Requests to a worker that has loaded the kernels of one checkout: problems, configs and compiled code."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from fp8tune.errors import UsageError
from fp8tune.measure import trees
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.backends import outcome_of
from fp8tune.measure.device import limits
from fp8tune.measure.trees import KERNELS, Tree
from fp8tune.measure.worker import RemoteError, Worker, WorkerDied
from fp8tune.plan import grids, problems
from fp8tune.plan.shapes import Selection
from fp8tune.records import Device, NamedInts, Problem
from fp8tune.replay.loading import load_spec
from fp8tune.replay.spec import RecordedSpec
from fp8tune_kernels.spec import KernelSpec

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Declared:
    """A kernel as one checkout declares it."""

    default: NamedInts
    arms: dict[Problem, KernelArm]
    """Launch of each problem as users get it: the config of the exported table, else the declared default."""


def ask(tree: Tree, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a worker of a checkout. Raises UsageError with its name if its kernels do not load."""
    worker = Worker()
    try:
        return worker.call(TIMEOUT_S, trees.within, tree, function, *args, **kwargs)
    except UsageError as error:
        raise UsageError(f"{tree.name}: {error}") from None
    except (WorkerDied, RemoteError) as error:
        raise UsageError(f"{tree.name} cannot be built: {outcome_of(error).reason}") from None
    finally:
        worker.kill()


# In the worker


def declared(reference: str, selections: Sequence[Selection], device: Device) -> Declared:
    """Return the kernel's problems with their configs. Raises UsageError if it does not load from the checkout."""
    spec = _spec(reference)
    every = [
        problem
        for chosen in selections
        for problem in problems.problems(spec, chosen.rows, chosen.settings, size=chosen.size, arch=device.arch)
    ]
    arms = {
        problem: KernelArm.from_spec(reference, spec, problem, _config_in_use(spec, problem, device))
        for problem in every
    }
    return Declared(spec.default, arms)


def candidates(reference: str, arms: Sequence[KernelArm], device: Device, count: int) -> list[list[KernelArm]]:
    """Return ``count`` arms for each arm: with the default, with its own config, and with a seeded choice of others."""
    spec = _spec(reference)
    result = []
    for arm in arms:
        grid = grids.configs(spec, arm.problem, spec.axes, limits(device))
        others = [config for config, pruned in grid.items() if not pruned and config != spec.default]
        chosen = random.Random(arm.problem.seed).sample(others, min(len(others), count - 1))
        configs = list(dict.fromkeys([spec.default, arm.config, *chosen]))[:count]
        result.append([KernelArm.from_spec(reference, spec, arm.problem, config) for config in configs])
    return result


def _spec(reference: str) -> KernelSpec:
    """Load a spec of the checkout. An installed package of its name would compare code with itself."""
    spec, tree = load_spec(reference), trees.taken()
    assert tree is not None
    modules = {getattr(function, "__module__", "") for function in (spec.launch, spec.reference, spec.inputs)}
    if isinstance(spec, RecordedSpec):
        modules = {spec.module}
    files = {Path(getattr(sys.modules.get(module), "__file__", None) or "") for module in modules}
    if not any(file.resolve().is_relative_to(tree.folder.resolve()) for file in files):
        raise UsageError(f"{reference} comes from {min(files)}, not from the checkout of {tree.name}")
    return spec


def _config_in_use(spec: KernelSpec, problem: Problem, device: Device) -> NamedInts:
    try:
        lookup: Any = importlib.import_module(f"{KERNELS}.runtime.lookup")
    except ModuleNotFoundError:  # a checkout from before the kernels' package had folders
        lookup = importlib.import_module(f"{KERNELS}.lookup")
    return NamedInts(lookup.pick(spec, spec.lookup_key(problem), lookup.table(device.arch), device.name))
