"""Compile a config for any arch, with or without that GPU: runs in pool workers, never touches a device.

The spec's own ``launch`` is called with meta tensors while ``JITFunction.run`` only compiles, so exactly the
specialization that a real launch asks for lands in Triton's cache (types, divisibility by 16, constexprs, options),
however many kernels a launch has. A stand-in driver names the target.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from typing import Any, cast

from fp8tune.compiled import facts
from fp8tune.errors import in_spec
from fp8tune.measure import edges, machine
from fp8tune.records import NamedInts, Outcome, Problem, Status
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.spec import Edge


def compile_config(
    reference: str, problem: Problem, config: NamedInts, arch: str, shared_limit: int, *, read_code: bool = False
) -> Outcome:
    """Compile every kernel that launching ``config`` on ``problem`` would launch on ``arch``.

    ``shared_limit``: bytes of shared memory (LDS) a block may have there. Facts are the worst over the kernels;
    ``read_code`` adds what else their binaries say.
    """
    started = time.perf_counter()
    printed = io.StringIO()  # Triton prints a program that ptxas refuses: thousands of lines
    try:
        with contextlib.redirect_stdout(printed):
            launches = record_launches(reference, problem, config, arch)
        sys.stderr.write(printed.getvalue())
        kernels = [launch.kernel for launch in launches]
        found = [facts.resources(kernel) for kernel in kernels]
        worst = facts.worst(found, time.perf_counter() - started)
        if read_code and kernels:
            worst = replace(worst, code=facts.code(kernels, found, config["num_warps"], ARCHES[arch]))
    except Exception as error:  # any compiler failure is this row's result
        machine.raise_if_machine(error)
        return Outcome(Status.COMPILE_ERROR, reason=one_line(error))
    if worst.shared_bytes is not None and worst.shared_bytes > shared_limit:
        reason = f"needs {worst.shared_bytes} bytes of shared memory a block, {arch} has {shared_limit}"
        return Outcome(Status.OUT_OF_RESOURCES, reason=reason, facts=worst)
    return Outcome(Status.OK, facts=worst)


def compile_edges(reference: str, problem: Problem, config: NamedInts, arch: str) -> None:
    """Compile what ``config`` launches on the edges of ``problem``, each code once a process: its check finds it then.

    What fails here fails there again, as a row.
    """
    spec = load_spec(reference)
    problems_own = Edge("", problem)
    for edge in (problems_own, *edges.edges_of(spec, problem)):
        with contextlib.suppress(Exception):
            inputs = edges.meta_inputs(spec, edge)
            outputs = spec.outputs(*inputs)
            with _recording(arch, compiles=False) as launches:
                spec.launch(config, inputs, outputs)
            code = (reference, config, arch, tuple(launch.kernel for launch in launches))
            if code not in _compiled and edge is not problems_own:
                with _recording(arch):
                    spec.launch(config, inputs, outputs)
            _compiled.add(code)


_compiled: set[Hashable] = set()


@dataclass(frozen=True)
class Launch:
    """One kernel of a launch: compiled, not run."""

    kernel: Any
    programs: int


def record_launches(reference: str, problem: Problem, config: NamedInts, arch: str) -> list[Launch]:
    """Compile what launching ``config`` on ``problem`` would launch, in its order. Raises what the compiler raises."""
    inputs, outputs = _meta_tensors(reference, problem)
    with _recording(arch) as launches:
        load_spec(reference).launch(config, inputs, outputs)
    return launches


def one_line(error: BaseException, limit: int = 300) -> str:
    """The innermost cause of an exception as one line: compilers wrap theirs in source listings."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = getattr(error, "error_message", None) or str(error)  # Triton's message without its source listing
    text = " ".join(str(said).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}"[:limit]


def distinct(reference: str, problems: Sequence[Problem], arch: str) -> list[Problem]:
    """Of problems that give the same machine code the one with the smallest grid, which is the hardest to fill."""
    return [same[0] for same in alike(reference, problems, arch)]


def alike(reference: str, problems: Sequence[Problem], arch: str) -> list[list[Problem]]:
    """Problems that give the same machine code, together; the one with the smallest grid first.

    Told by launching the declared default with nothing compiled: Triton specializes code on constants, on dtypes and on
    what 16 divides.
    """
    groups: dict[Hashable, list[tuple[int, Problem]]] = {}
    for problem in problems:
        signature, programs = _signature(reference, problem, arch)
        groups.setdefault((problem.input_layout, signature), []).append((programs, problem))
    return [[problem for _, problem in sorted(group, key=itemgetter(0))] for group in groups.values()]


def _signature(reference: str, problem: Problem, arch: str) -> tuple[Hashable, int]:
    """What the code of a launch of the default is specialized on, and the programs of its smallest grid."""
    spec = load_spec(reference)
    try:
        inputs, outputs = _meta_tensors(reference, problem)
    except Exception as error:
        raise in_spec(spec.name, "inputs or outputs on meta tensors", spec.inputs, error) from error
    with _recording(arch, compiles=False) as launches, contextlib.redirect_stdout(sys.stderr):
        try:
            spec.launch(spec.default, inputs, outputs)
        except Exception:  # compiling it will fail the same way, and say so in a row
            return problem, 0
    return tuple(launch.kernel for launch in launches), min((launch.programs for launch in launches), default=0)


def _specialization(function: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Hashable:
    """What one launch asks Triton to specialize a kernel on, as Triton's own documentation of ``jit`` has it."""

    def of(parameter: Any, value: Any) -> Hashable:
        if hasattr(value, "dtype"):
            return str(value.dtype), value.data_ptr() % 16 == 0
        if parameter.is_constexpr or not isinstance(value, int):
            return str(value)
        return None if parameter.do_not_specialize else (value == 1, value % 16 == 0)

    values = {parameter.name: value for parameter, value in zip(function.params, args, strict=False)} | dict(options)
    return function.__name__, tuple(of(each, values[each.name]) for each in function.params if each.name in values)


@cache
def _meta_tensors(reference: str, problem: Problem) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    spec = load_spec(reference)
    inputs = spec.inputs(problem, "meta")
    return inputs, spec.outputs(*inputs)


class _recording:  # noqa: N801 - a context manager, used as a word
    """While open, launching a Triton kernel compiles it for ``arch`` and keeps the result; nothing runs.

    Without ``compiles`` it keeps what the code would be specialized on instead.
    """

    def __init__(self, arch: str, compiles: bool = True) -> None:
        self._arch, self._compiles = arch, compiles
        self.launches: list[Launch] = []

    def __enter__(self) -> list[Launch]:
        import triton
        from triton.runtime.jit import JITFunction

        self._lookups = _lookups_of(self._arch)
        self._lookups.__enter__()
        self._driver = triton.runtime.driver
        self._driver.set_active(_target_driver(self._arch))
        self._run = JITFunction.run

        def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            if self._compiles:
                kernel = self._run(function, *args, grid=grid, warmup=True, **options)
            else:
                kernel = _specialization(function, args, options)
            self.launches.append(Launch(kernel, math.prod(grid)))
            return kernel

        JITFunction.run = compile_only
        return self.launches

    def __exit__(self, *_: object) -> None:
        from triton.runtime.jit import JITFunction

        JITFunction.run = self._run
        self._lookups.__exit__(None, None, None)


def _lookups_of(arch: str) -> contextlib.AbstractContextManager[None]:
    """A launch that looks configs up finds those of ``arch``. The lookup is imported now: ``compare`` has two trees."""
    try:
        of: Any = importlib.import_module("fp8tune_kernels.runtime.lookup").compiling_for
    except (ModuleNotFoundError, AttributeError):  # a tree from before it: no launch there looks anything up
        return contextlib.nullcontext()
    return cast(contextlib.AbstractContextManager[None], of(arch))


@cache
def _target_driver(arch: str) -> Any:
    """A Triton driver that knows its target and nothing else."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    target = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)

    class TargetDriver(DriverBase):  # type: ignore[misc]
        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> Any:
            return target

        def get_current_device(self) -> str:
            return arch  # Triton caches binaries by device: one arch must never get another's

        def get_current_stream(self, device: str) -> int:
            return 0

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("meta")

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise NotImplementedError("nothing is launched here")

        def get_benchmarker(self) -> Any:
            raise NotImplementedError("nothing is timed here")

    return TargetDriver()
