"""Hash of the work of one launch: two sides with the same hash run the same code.

It covers each kernel's binary with its launch options, its grid and its arguments (of tensors: dtype, shape, strides;
constants are in the binary), and every torch operation beside it, in order. Line info must be off
(``TRITON_DISABLE_LINE_INFO=1``), or a comment would change binaries.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fp8tune.measure import compiling
from fp8tune.records import NamedInts, Problem

BINARIES = ("cubin", "hsaco")

# Metadata of a binary that its launch depends on. Its hash differs where a comment does.
OPTIONS = ("name", "shared", "num_warps", "num_ctas", "cluster_dims", "launch_cooperative_grid", "launch_pdl")


def launched_code(reference: str, problem: Problem, config: NamedInts, arch: str) -> str:
    """Return 16 hex digits for what launching ``config`` on ``problem`` runs on ``arch``; needs no GPU.

    Raises what the compiler raises.
    """
    notes: list[str] = []
    with _launches(notes), _operations(notes):
        compiling.record_launches(reference, problem, config, arch)
    return hashlib.sha256("\n".join(notes).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _launches(notes: list[str]) -> Iterator[None]:
    """Add a line for every Triton kernel that is compiled for a launch."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def noting(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(function, *args, grid=grid, warmup=warmup, **options)
        blocks = grid({**dict(zip(function.arg_names, args, strict=False)), **options}) if callable(grid) else grid
        code = next(kernel.asm[name] for name in BINARIES if name in kernel.asm)
        metadata = [str(getattr(kernel.metadata, name, None)) for name in OPTIONS]
        pairs = zip(args, function.params, strict=False)
        values = [value for value, parameter in pairs if value is not None and not parameter.is_constexpr]
        digest = hashlib.sha256(code).hexdigest()
        notes.append(f"{digest} {metadata} {tuple(blocks)} {_described(values, options)}")
        return kernel

    JITFunction.run = noting
    try:
        yield
    finally:
        JITFunction.run = run


def _described(args: Sequence[Any], options: Mapping[str, Any]) -> list[str]:
    import torch

    def described(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.storage_offset()}"
        return repr(value) if isinstance(value, int | float | str | bool | tuple | None) else type(value).__name__

    return [described(value) for value in (*args, *options.items())]


def _operations(notes: list[str]) -> contextlib.AbstractContextManager[Any]:
    """Add a line for every torch operation, such as a fill or a copy."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            notes.append(f"{function} {_described(args, kwargs or {})}")
            return function(*args, **(kwargs or {}))

    return Operations()  # type: ignore[no-untyped-call]
