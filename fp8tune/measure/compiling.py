"""Compile a config for any arch, with or without that GPU: runs in pool workers, never touches a device.

The spec's own ``launch`` is called with meta tensors while ``JITFunction.run`` only compiles, so exactly the
specialization of a real launch lands in Triton's cache (types, divisibility by 16, constexprs, options), however many
kernels a launch has. A stand-in driver names the target.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import sys
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from typing import Any

from fp8tune.compiled import facts
from fp8tune.errors import in_spec, one_line
from fp8tune.measure import codegen, edges, machine
from fp8tune.measure.device import software
from fp8tune.records import Compiler, NamedInts, Outcome, Problem, Status
from fp8tune.replay.lazy import torch, triton
from fp8tune.replay.loading import load_spec
from fp8tune.replay.spec import default_of


@dataclass(frozen=True)
class Launch:
    """One kernel of a launch: compiled, not run."""

    kernel: Any
    programs: int


def compile_config(
    reference: str, problem: Problem, config: NamedInts, arch: str, shared_limit: int, *, is_run: bool = False
) -> Outcome:
    """Compile every kernel that launching ``config`` on ``problem`` would launch on ``arch``.

    ``shared_limit``: bytes of shared memory (LDS) that a block may have. Facts are the worst over the kernels. If the
    config ``is_run`` afterwards, its edges are compiled as well.
    """
    started = time.perf_counter()
    printed = io.StringIO()  # Triton prints a program that ptxas refuses: thousands of lines
    try:
        with contextlib.redirect_stdout(printed):
            launches = record_launches(reference, problem, config, arch)
        sys.stderr.write(printed.getvalue())
        kernels = [launch.kernel for launch in launches]
        resources = [facts.resources(kernel) for kernel in kernels]
        worst = facts.worst(resources, time.perf_counter() - started)
        if kernels:
            worst = replace(worst, code_hash=facts.code_hash(kernels, resources), compiler=compiler_of(arch))
    except Exception as error:  # any compiler failure is this row's result
        machine.raise_if_machine(error)
        return Outcome(Status.COMPILE_ERROR, reason=one_line(error))
    if worst.shared_bytes is not None and worst.shared_bytes > shared_limit:
        reason = f"needs {worst.shared_bytes} bytes of shared memory a block, {arch} has {shared_limit}"
        return Outcome(Status.OUT_OF_RESOURCES, reason=reason, facts=worst)
    if is_run:
        compile_edges(reference, problem, config, arch)
    return Outcome(Status.OK, facts=worst)


@cache
def compiler_of(arch: str) -> Compiler:
    """Return the compiler of this process for an arch."""
    return Compiler(arch, software().triton, codegen.settings(), facts.ptxas_version(arch))


def compile_edges(reference: str, problem: Problem, config: NamedInts, arch: str) -> None:
    """Compile the launches of ``config`` on the edges of ``problem``. What fails here fails in its check, as a row."""
    spec = load_spec(reference)
    for edge in edges.edges_of(spec, problem):
        with contextlib.suppress(Exception), recording(arch):
            inputs = edges.meta_inputs(spec, edge)
            spec.launch(config, inputs, spec.outputs(*inputs))


def record_launches(reference: str, problem: Problem, config: NamedInts, arch: str) -> list[Launch]:
    """Compile the kernels that ``config`` launches on ``problem``, in their order. Raises what the compiler raises."""
    inputs, outputs = _meta_tensors(reference, problem)
    with recording(arch) as launches:
        load_spec(reference).launch(config, inputs, outputs)
    return launches


def alike(reference: str, problems: Sequence[Problem], arch: str) -> list[list[Problem]]:
    """Group problems by their machine code; the one with the smallest grid, the hardest to fill, comes first.

    The declared default is launched with nothing compiled: Triton specializes code on constants, dtypes and
    divisibility by 16.
    """
    spec = load_spec(reference)
    groups: dict[Hashable, list[tuple[int, Problem]]] = {}
    for problem in problems:
        try:
            inputs, outputs = _meta_tensors(reference, problem)
        except Exception as error:
            raise in_spec(spec.name, "inputs or outputs on meta tensors", spec.inputs, error) from error
        with recording(arch, compiles=False) as launches, contextlib.redirect_stdout(sys.stderr):
            try:
                spec.launch(default_of(spec, problem), inputs, outputs)
                code: Hashable = tuple(launch.kernel for launch in launches)
            except Exception:  # compiling it fails the same way, as a row
                code, launches = problem, []
        programs = min((launch.programs for launch in launches), default=0)
        groups.setdefault((problem.input_layout, code), []).append((programs, problem))
    return [[problem for _, problem in sorted(group, key=itemgetter(0))] for group in groups.values()]


@contextlib.contextmanager
def recording(arch: str, compiles: bool = True) -> Iterator[list[Launch]]:
    """Compile Triton kernels for ``arch`` instead of launching them, and yield the list that they are added to.

    Without ``compiles`` it holds what the code would be specialized on instead.
    """
    jit_function, launches = triton.runtime.jit.JITFunction, list[Launch]()
    run = jit_function.run

    def record(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if compiles:
            kernel = run(function, *args, grid=grid, warmup=True, **options)
        else:
            kernel = _specialization(function, args, options)
        launches.append(Launch(kernel, math.prod(grid)))
        return kernel

    lookups: Any = contextlib.nullcontext
    with contextlib.suppress(ModuleNotFoundError, AttributeError):  # an older tree, where no launch looks a config up
        # Imported now, because a worker of compare may have the kernels of another tree.
        lookups = importlib.import_module("fp8tune_kernels.runtime.lookup").compiling_for
    with lookups(arch):  # a launch that looks configs up finds those of the arch
        triton.runtime.driver.set_active(_target_driver(arch))
        jit_function.run = record
        try:
            yield launches
        finally:
            jit_function.run = run


def _specialization(function: Any, args: Sequence[Any], options: dict[str, Any]) -> Hashable:
    """Return what Triton specializes a kernel on in one launch, as its documentation of ``jit`` describes it."""
    values = {parameter.name: value for parameter, value in zip(function.params, args, strict=False)} | options
    parts: list[Hashable] = []
    for parameter in function.params:
        if parameter.name in values:
            value = values[parameter.name]
            if hasattr(value, "dtype"):
                parts.append((str(value.dtype), value.data_ptr() % 16 == 0))
            elif parameter.is_constexpr or not isinstance(value, int):
                parts.append(str(value))
            else:
                parts.append(None if parameter.do_not_specialize else (value == 1, value % 16 == 0))
    return function.__name__, tuple(parts)


@cache
def _meta_tensors(reference: str, problem: Problem) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    spec = load_spec(reference)
    inputs = spec.inputs(problem, "meta")
    return inputs, spec.outputs(*inputs)


@cache
def _target_driver(arch: str) -> Any:
    """Return a Triton driver that knows its target and nothing else."""
    gpu_target, base = triton.backends.compiler.GPUTarget, triton.backends.driver.DriverBase
    target = gpu_target("hip", arch, 64) if arch.startswith("gfx") else gpu_target("cuda", int(arch[3:]), 32)
    methods = {
        "is_active": classmethod(lambda cls: True),
        "get_current_target": lambda self: target,
        "get_current_device": lambda self: arch,  # Triton caches binaries by device: one arch must never get another's
        "get_current_stream": lambda self, device: 0,
        "get_active_torch_device": lambda self: torch.device("meta"),
        "map_python_to_cpp_type": None,  # nothing is launched
        "get_benchmarker": None,  # nothing is timed
    }
    return type("TargetDriver", (base,), methods)()
