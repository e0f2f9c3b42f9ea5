"""Compile every kernel's default config for a GPU that is not here; print what the compilers made, as JSON.

Run as a script, ``compile_kernels.py ARCH``: interpreting and compiling cannot share a process.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from fp8tune_kernels import catalog
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.spec import KernelSpec, Problem

ROWS = (
    {"M": 16640, "K": 5120, "N": 8192, "E": 16},
    {"M": 16641, "K": 5120, "N": 8192, "E": 1},
    {"M": 1, "K": 5120, "N": 8192, "E": 3},
)
"""Differing in nothing that may recompile: the exact number of rows, groups and experts. All tensors are below 2 GiB,
where AMD's back end takes 32-bit offsets."""


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
    """Kernel -> how many sets of binaries launches on :data:`ROWS` take, and the assembly of the first launch.

    A kernel is named as it is, and once more, as ``NAME LAYOUT``, for each input layout but the first.
    """
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
        for layout in spec.input_layouts:
            launches = []
            for row in ROWS:
                compiled.clear()
                launch_on(
                    spec, Problem(name, next(spec.problems(row)), input_layout=layout, fp8_dtype=record.fp8_dtype)
                )
                launches.append([*compiled])
            texts = [kernel.asm["amdgcn" if record.backend == "hip" else "ptx"] for kernel in launches[0]]
            binaries = {tuple(kernel.hash for kernel in launch) for launch in launches}
            label = name if layout == spec.input_layouts[0] else f"{name} {layout}"
            found[label] = {"binaries": len(binaries), "assembly": "\n".join(texts)}
    return found


def launch_on(spec: KernelSpec, problem: Problem) -> None:
    """Launch the default config on tensors that have shapes and strides only."""
    inputs = spec.inputs(replace(problem, routing="jagged" if spec.routed else "none"), "meta")
    spec.launch(spec.default, inputs, spec.outputs(*inputs))


if __name__ == "__main__":
    print(json.dumps(compile_for(sys.argv[1])))
