"""Compile a config for any arch, with or without that GPU: runs in pool workers, never touches a device.

The spec's own ``launch`` is called with meta tensors while ``JITFunction.run`` only compiles, so exactly the
specialization that a real launch asks for lands in Triton's cache (types, divisibility by 16, constexprs, options),
however many kernels a launch has. A stand-in driver names the target.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

from fp8tune.loading import load_spec
from fp8tune.records import Facts, NamedInts, Problem, Status


@dataclass(frozen=True)
class Compiled:
    """What compiling one config gave. ``status`` is ``ok``, ``compile_error`` or ``out_of_resources``."""

    status: Status
    reason: str = ""
    facts: Facts = Facts()
    from_cache: bool = False


def compile_config(reference: str, problem: Problem, config: NamedInts, arch: str, shared_limit: int) -> Compiled:
    """Compile every kernel that launching ``config`` on ``problem`` would launch on ``arch``.

    ``shared_limit``: bytes of shared memory (LDS) a block may have there. Facts are the worst over the kernels.
    """
    spec = load_spec(reference)
    started = time.perf_counter()
    try:
        with _recording(arch) as kernels:
            inputs, outputs = _meta_tensors(reference, problem)
            spec.launch(config, inputs, outputs)
        facts = [kernel_facts(kernel) for kernel in kernels]
    except Exception as error:  # any compiler failure is this row's result
        return Compiled(Status.COMPILE_ERROR, one_line(error))
    worst = Facts(
        registers=max((f.registers or 0 for f in facts), default=None),
        spill_bytes=max((f.spill_bytes or 0 for f in facts), default=None),
        shared_bytes=max((f.shared_bytes or 0 for f in facts), default=None),
        compile_s=time.perf_counter() - started,
    )
    if worst.shared_bytes is not None and worst.shared_bytes > shared_limit:
        reason = f"needs {worst.shared_bytes} bytes of shared memory a block, {arch} has {shared_limit}"
        return Compiled(Status.OUT_OF_RESOURCES, reason, worst)
    return Compiled(Status.OK, facts=worst)


def one_line(error: BaseException, limit: int = 300) -> str:
    """The innermost cause of an exception as one line: compilers wrap theirs in source listings."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = getattr(error, "error_message", None) or str(error)  # Triton's message without its source listing
    text = " ".join(str(said).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}"[:limit]


def kernel_facts(kernel: Any) -> Facts:
    """Registers, spills and shared memory of a compiled Triton kernel, from its binary (NVIDIA) or assembly (AMD)."""
    shared = int(kernel.metadata.shared)
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        spilled = _amd(text, "vgpr_spill_count") + _amd(text, "sgpr_spill_count")
        # counted in registers of 4 bytes; scratch shows what was really given to memory
        return Facts(_amd(text, "vgpr_count"), max(4 * spilled, _amd(text, "private_segment_fixed_size")), shared)
    registers, stack = _cuda_resources(kernel.asm["cubin"])
    return Facts(registers, stack, shared)


def _amd(assembly: str, field: str) -> int:
    values = [int(value) for value in re.findall(rf"\.{field}:\s*(\d+)", assembly)]
    return max(values, default=0)


def _cuda_resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and stack bytes (where spills go) as ``cuobjdump`` of Triton's wheel reads them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [_cuobjdump(), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    if found is None:
        raise RuntimeError("cuobjdump printed no resource usage")
    return int(found[1]), int(found[2])


@cache
def _cuobjdump() -> str:
    from triton import knobs

    return str(knobs.nvidia.cuobjdump.path)


@cache
def _meta_tensors(reference: str, problem: Problem) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    spec = load_spec(reference)
    inputs = spec.inputs(problem, "meta")
    return inputs, spec.outputs(*inputs)


class _recording:  # noqa: N801 - a context manager, used as a word
    """While open, launching a Triton kernel compiles it for ``arch`` and keeps the result; nothing runs."""

    def __init__(self, arch: str) -> None:
        self._arch = arch
        self.kernels: list[Any] = []

    def __enter__(self) -> list[Any]:
        import triton
        from triton.runtime.jit import JITFunction

        self._driver = triton.runtime.driver
        self._driver.set_active(_target_driver(self._arch))
        self._run = JITFunction.run

        def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            kernel = self._run(function, *args, grid=grid, warmup=True, **options)
            self.kernels.append(kernel)
            return kernel

        JITFunction.run = compile_only
        return self.kernels

    def __exit__(self, *_: object) -> None:
        from triton.runtime.jit import JITFunction

        JITFunction.run = self._run


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
