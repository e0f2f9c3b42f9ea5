"""Compile every kernel's default config for a GPU that is not here; print what the compilers made, as JSON.

Run as a script, ``compile_kernels.py ARCH``: interpreting and compiling cannot share a process.
"""

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from fp8tune_kernels import catalog
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.spec import Problem

ROWS = (
    {"M": 16640, "K": 5120, "N": 8192, "E": 64},
    {"M": 16641, "K": 5120, "N": 8192, "E": 1},
    {"M": 1, "K": 5120, "N": 8192, "E": 3},
)
"""Differing in nothing that may recompile: the exact number of rows and groups."""


class TargetDriver(DriverBase):
    """Knows what to compile for, and nothing else."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


def compile_for(arch: str) -> dict[str, Any]:
    """Kernel name -> number of binaries for :data:`ROWS`, and the assembly of one."""
    record = ARCHES[arch]
    target = arch if record.backend == "hip" else int(arch.removeprefix("sm_"))
    triton.runtime.driver.set_active(TargetDriver(GPUTarget(record.backend, target, record.warp_size)))
    run, compiled = JITFunction.run, []
    JITFunction.run = lambda self, *args, grid, warmup, **options: compiled.append(
        run(self, *args, grid=grid, warmup=True, **options)
    )
    found = {}
    for name in catalog.KERNELS:
        spec = catalog.load(name)
        compiled.clear()
        for row in ROWS:
            shape = next(spec.problems(row))
            routing = "jagged" if spec.routed else "none"
            inputs = spec.inputs(Problem(name, shape, routing, fp8_dtype=record.fp8_dtype), "meta")
            spec.launch(spec.default, inputs, spec.outputs(*inputs))
        text = compiled[0].asm["amdgcn" if record.backend == "hip" else "ptx"]
        found[name] = {"binaries": len({kernel.hash for kernel in compiled}), "assembly": text}
    return found


if __name__ == "__main__":
    print(json.dumps(compile_for(sys.argv[1])))
