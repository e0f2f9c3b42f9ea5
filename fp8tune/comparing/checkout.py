"""Functions that a worker runs with the kernels of one checkout: problems, candidates, and hashes of launched code."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from fp8tune.compiled import facts
from fp8tune.errors import UsageError
from fp8tune.measure import compiling, trees
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.device import limits
from fp8tune.plan import grids, problems
from fp8tune.plan.shapes import Selection
from fp8tune.records import Device, NamedInts, Problem
from fp8tune.replay.loading import load_spec
from fp8tune.replay.spec import RecordedSpec
from fp8tune_kernels.spec import KernelSpec


def launches(
    reference: str, selections: Sequence[Selection], device: Device
) -> tuple[frozenset[str], dict[Problem, KernelArm]]:
    """Return the kernel's axes, and each problem as users get it: with its table's config, else the default.

    For Triton's interpreter problems are scaled down, except recorded launches that are too large for it.

    Raises UsageError if the kernel does not load from the checkout.
    """
    spec = _spec(reference)
    lookup: Any = importlib.import_module(f"{trees.KERNELS}.runtime.lookup")
    table = lookup.table(device.arch)
    arms = {}
    for chosen in selections:
        sizes = problems.problems(spec, chosen.rows, chosen.settings, size=chosen.size, arch=device.arch)
        if device.arch == "interpreter":
            sizes = problems.scaled_down(spec, sizes)
        for problem in sizes:
            config = NamedInts(lookup.pick(spec, spec.lookup_key(problem), table, device.name))
            arms[problem] = KernelArm.from_spec(reference, spec, problem, config)
    return frozenset(spec.default), arms


def shapes(reference: str, selections: Sequence[Selection]) -> frozenset[NamedInts]:
    """Return the shapes that the kernel has in the selections. Raises UsageError if it has none."""
    spec = _spec(reference)
    sizes = [problems.problems(spec, chosen.rows, chosen.settings, size=chosen.size) for chosen in selections]
    return frozenset(problem.shape for problem in chain(*sizes))


def candidates(reference: str, arms: Sequence[KernelArm], device: Device, count: int) -> list[list[KernelArm]]:
    """Return ``count`` arms for each arm: with the default, with its own config, and with a seeded choice of others."""
    spec = _spec(reference)
    result = []
    for arm in arms:
        if device.arch == "interpreter":
            grid = grids.interpreter_configs(spec, arm.problem, spec.axes)
        else:
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


def launched_code(reference: str, problem: Problem, config: NamedInts, arch: str) -> str:
    """Return 16 hex digits for what launching ``config`` on ``problem`` runs on ``arch``; needs no GPU.

    It covers each kernel's machine code, its grid and its arguments (of tensors: dtype, shape, strides; constants are
    in the code), and every torch operation beside it, in order. Raises what the compiler raises.
    """
    with _noted() as notes:
        compiling.record_launches(reference, problem, config, arch)
    return hashlib.sha256("\n".join(notes).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _noted() -> Iterator[list[str]]:
    """Yield a list that gets a line for every Triton kernel that is compiled, and for every torch operation."""
    import torch  # loads a GPU library: only in workers
    from torch.utils._python_dispatch import TorchDispatchMode
    from triton.runtime.jit import JITFunction

    notes: list[str] = []
    run = JITFunction.run

    def described(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.storage_offset()}"
        is_plain = isinstance(value, int | float | str | bool | tuple | None)
        return repr(value) if is_plain else type(value).__name__

    def noting(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(function, *args, grid=grid, warmup=warmup, **options)
        blocks = grid({**dict(zip(function.arg_names, args, strict=False)), **options}) if callable(grid) else grid
        pairs = zip(args, function.params, strict=False)
        values = [value for value, parameter in pairs if value is not None and not parameter.is_constexpr]
        code = facts.code_hash([kernel], [facts.resources(kernel)])
        notes.append(f"{code} {tuple(blocks)} {[*map(described, (*values, *options.items()))]}")
        return kernel

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            notes.append(f"{function} {[*map(described, (*args, *kwargs.items()))]}")
            return function(*args, **kwargs)

    JITFunction.run = noting
    try:
        with Operations():  # type: ignore[no-untyped-call]
            yield notes
    finally:
        JITFunction.run = run
