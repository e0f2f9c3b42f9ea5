"""Hash of the work of one launch: two sides with the same hash run the same code.

It covers each kernel's machine code, its grid and its arguments (of tensors: dtype, shape, strides; constants are in
the code), and every torch operation beside it, in order.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

from fp8tune.compiled import facts
from fp8tune.measure import compiling
from fp8tune.records import NamedInts, Problem


def launched_code(reference: str, problem: Problem, config: NamedInts, arch: str) -> str:
    """Return 16 hex digits for what launching ``config`` on ``problem`` runs on ``arch``; needs no GPU.

    Raises what the compiler raises.
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

    def described(*values: Any) -> list[str]:
        texts = []
        for value in values:
            if isinstance(value, torch.Tensor):
                texts.append(f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.storage_offset()}")
            else:
                is_plain = isinstance(value, int | float | str | bool | tuple | None)
                texts.append(repr(value) if is_plain else type(value).__name__)
        return texts

    def noting(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(function, *args, grid=grid, warmup=warmup, **options)
        blocks = grid({**dict(zip(function.arg_names, args, strict=False)), **options}) if callable(grid) else grid
        pairs = zip(args, function.params, strict=False)
        values = [value for value, parameter in pairs if value is not None and not parameter.is_constexpr]
        code = facts.code_hash([kernel], [facts.resources(kernel)])
        notes.append(f"{code} {tuple(blocks)} {described(*values, *options.items())}")
        return kernel

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            notes.append(f"{function} {described(*args, *kwargs.items())}")
            return function(*args, **kwargs)

    JITFunction.run = noting
    try:
        with Operations():  # type: ignore[no-untyped-call]
            yield notes
    finally:
        JITFunction.run = run
