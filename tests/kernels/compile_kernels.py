"""Compile a config for every form of every kernel, for GPUs that are not here, and print the results as JSON.

Run as a script, ``compile_kernels.py ARCH...``: interpreting and compiling cannot share a process.
"""

import contextlib
import functools
import gc
import json
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from triton.backends.amd.compiler import HIPBackend
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import cache
from triton.runtime.jit import JITFunction

from fp8tune.measure.compiling import recording
from fp8tune.measure.edges import meta_inputs
from fp8tune_kernels import catalog, quantize_colwise
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.moe import expert_parallel
from fp8tune_kernels.spec import Edge, KernelSpec, NamedInts, Problem

ROWS = (
    {"M": 16640, "K": 5120, "N": 8192, "E": 16},
    {"M": 16641, "K": 5120, "N": 8192, "E": 1},
    {"M": 1, "K": 5120, "N": 8192, "E": 3},
)
"""Differing in nothing that may recompile: the exact number of rows, groups and experts. All tensors are below 2 GiB,
where AMD's back end takes 32-bit offsets."""

ON_AMD = ("rowwise-2d", "colwise", "mxfp8-dim1", "transposed-codes", "swiglu-rowwise", "swiglu-gradient", "gather-sum")
"""Kernels that are compiled for AMD, too: with the GEMMs one for each kind of load and store."""


def compile_for(arch: str) -> dict[str, Any]:
    """Kernel -> how many sets of binaries launches on :data:`ROWS` take, and the assembly of the first launch.

    The labels are those of :func:`variants`.
    """
    record, forms = ARCHES[arch], {}
    CUDABackend.make_cubin = HIPBackend.make_hsaco = lambda *_: b""  # a fifth of the time, and the assembly is read
    for name in catalog.KERNELS if arch == "sm_90" else (*ON_AMD, *catalog.GEMMS):
        spec = catalog.load(name)
        own = record.fp8_dtype if record.fp8_dtype in spec.in_dtypes else spec.in_dtypes[0]
        for label, (layout, config) in variants(spec, arch).items():
            launches = []
            for row in ROWS:
                shape = next(spec.problems(row))
                problem = Problem(name, shape, input_layout=layout, in_dtype=own, fp8_dtype=record.fp8_dtype)
                inputs = spec.inputs(replace(problem, routing="jagged" if spec.routed else "none"), "meta")
                with recording(arch) as compiled:
                    spec.launch(config, inputs, spec.outputs(*inputs))
                launches.append([launch.kernel for launch in compiled])
            texts = [kernel.asm["amdgcn" if record.backend == "hip" else "ptx"] for kernel in launches[0]]
            binaries = {tuple(kernel.hash for kernel in launch) for launch in launches}
            forms[label] = {"binaries": len(binaries), "assembly": "\n".join(texts)}
            if arch == "sm_90":  # one arch: what fails is Triton's reading of the code
                with recording(arch):
                    forms[label]["edges"] = [*edges_that_fail(spec, problem, config)]
    if arch == "sm_90":
        forms["gather-sum over ranks"] = expert_parallel_forms(arch)
    return forms


def expert_parallel_forms(arch: str) -> dict[str, Any]:
    """Binaries and assembly of expert parallelism's kernels, which belong to no spec, on batches of two ranks."""
    make, K, launches = functools.partial(torch.empty, device="meta"), 2048, []
    for T in (4096, 4097, 1):
        padded, choice = expert_parallel._rows_with_words(T, 17, K), make(T, 8)
        received, offs = make(2 * padded, K, dtype=torch.float8_e4m3fn), make(T, dtype=torch.int32)
        with recording(arch) as compiled:
            expert_parallel._outgoing(make(T, K), choice.long(), choice, T, padded, received.dtype)
            expert_parallel._unpacked(received, offs, T, T, padded, 0, 0)
            _, ids, _ = expert_parallel._unpacked(received, None, 0, T, padded, 8, T)
            rows = make(T, K, dtype=torch.bfloat16), choice[:, 0]
            sums = expert_parallel._sum_local_rows(*rows, ids, offs, T, padded, torch.bfloat16)
            expert_parallel._sum_of_ranks(sums, 2, T)
        launches.append([launch.kernel for launch in compiled])
    binaries = {tuple(kernel.hash for kernel in launch) for launch in launches}
    return {"binaries": len(binaries), "assembly": "\n".join(kernel.asm["ptx"] for kernel in launches[0])}


class CodeReadError(Exception):
    """Triton has read the code."""


def stop(*_: Any, **__: Any) -> None:
    raise CodeReadError


def edges_that_fail(spec: KernelSpec, problem: Problem, config: NamedInts) -> Iterator[str]:
    """The declared edges with a size of 1 that do not compile, each with its reason: such a size is a constant of the
    code. Triton only reads the code, which is what fails there; the launches before went through all passes."""
    run, lower = JITFunction.run, CUDABackend.make_ttir

    def read(*arguments: Any, **options: Any) -> None:
        with contextlib.suppress(CodeReadError):  # a launch may be of several kernels
            run(*arguments, **options)

    edges: dict[Any, Edge] = {}  # with all sizes that are 1 in some edge: routings and addresses are not in the code
    for edge in spec.edges(problem):
        shape = edge.problem.shape
        ones = {dim: 1 for dim, size in shape.items() if size == 1}
        flags = tuple(size for dim, size in shape.items() if dim not in "MNKEG")
        if ones:
            before = edges.setdefault(flags, edge)
            shape = NamedInts({**before.problem.shape, **ones})
            edges[flags] = replace(before, problem=replace(before.problem, shape=shape))
    JITFunction.run, CUDABackend.make_ttir = read, stop
    for edge in edges.values():
        inputs = meta_inputs(spec, edge)
        try:
            spec.launch(config, inputs, spec.outputs(*inputs))
        except Exception as error:
            yield f"{edge.name}: {error}"
    JITFunction.run, CUDABackend.make_ttir = run, staticmethod(lower)


SMALLER = {"BLOCK_SIZE": 64, "BLOCK_SIZE_ITER": 128, "num_warps": 4}
"""Blocks of the kernels that walk twice or in panels: half of the code of their defaults, with the same accesses."""


def variants(spec: KernelSpec, arch: str) -> dict[str, tuple[str, NamedInts]]:
    """Input layout and config of each kernel form that has code of its own, by label.

    A kernel's name is its default form on the first layout. On sm_90 there are also ``NAME LAYOUT`` for each other
    layout and, for a kernel that walks twice or in panels, ``NAME panels`` or ``NAME twice``.
    """
    first, *others = spec.input_layouts
    config = NamedInts({**spec.default, **SMALLER}) if {"BLOCK_SIZE", "LEAD"} <= {*spec.axes} else spec.default
    forms = {spec.name: (first, config)}
    if arch != "sm_90":  # the forms share their loads and stores: one arch shows what Triton makes of them
        return forms
    for layout in others:
        forms[f"{spec.name} {layout}"] = layout, config
    if 0 in spec.axes.get("LEAD", ()):
        name, lead = ("twice", 0) if spec.default["LEAD"] else ("panels", max(spec.axes["LEAD"]))
        forms[f"{spec.name} {name}"] = spec.input_layouts[-1], NamedInts({**config, "LEAD": lead})
    return forms


def is_the_reference_on_a_cpu() -> bool:
    """Return True if a wrapper gives the reference's bytes where nothing is interpreted."""
    x, offs = torch.randn(20, 8), torch.tensor([7, 16], dtype=torch.int32)
    q, scales = quantize_colwise(x, offs)
    right = catalog.load("colwise").reference(x, offs, q.dtype, True)
    return torch.equal(q.view(torch.uint8), right[0].view(torch.uint8)) and torch.equal(scales, right[1])


if __name__ == "__main__":
    if not is_the_reference_on_a_cpu():
        sys.exit("a CPU without the interpreter does not run the reference")
    torch.set_num_threads(1)
    gc.disable()
    cache.triton_key = str  # hashes 460 MB of libraries, for a cache of this script's own
    with multiprocessing.get_context("fork").Pool(len(sys.argv) - 1) as pool:
        print(json.dumps(dict(zip(sys.argv[1:], pool.map(compile_for, sys.argv[1:], chunksize=1), strict=True))))
