"""Launch a kernel again without having Triton find out again which binary it is.

``kernel[grid](...)`` binds and specializes every argument at each call: half of the host time of an operator. Here a
binary is remembered by all that Triton chose it by, and goes to Triton's launcher, with pointers as integers, which
spares the driver a question for each.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import _allocation, driver

__all__ = ["Launch", "current_stream", "is_hooked", "launch_kernel", "recorders"]

_REMEMBERS = torch.version.cuda is not None
"""On AMD Triton specializes on more than this module knows of: on tensors below 2 GiB."""

_NO_ALLOCATOR = _allocation._NULL_ALLOCATOR

Launch = tuple[Any, Any, Any, tuple[Any, ...]]
"""Of a compiled kernel: what runs it, its function, its packed metadata, its arguments that follow the sizes."""

_launches: dict[tuple[Any, ...], Launch] = {}
"""By what a call is given, which takes less time to tell than what Triton chooses by: sizes as they are."""

MOST_LAUNCHES = 4096
"""A process whose numbers of rows never repeat begins anew."""

_binaries: dict[tuple[Any, ...], Launch] = {}
"""By what Triton chooses by."""


class _Recorders(threading.local):
    """Recorders of the launches of this thread: see :mod:`.replay`."""

    current: Any = None


recorders = _Recorders()


def launch_kernel(
    kernel: Any,
    programs: int,
    tensors: Sequence[torch.Tensor | None],
    sizes: tuple[int, ...],
    constants: tuple[Any, ...],
    config: Mapping[str, int],
) -> None:
    """``kernel[(programs,)](*tensors, *sizes, *constants, **config)``, faster from the second time on.

    All tensors are on the current device, and the first is not None. An argument keeps its type: ``True`` and ``1``
    count as the same. Tensor descriptors that a kernel makes lie in memory of torch's.
    """
    first = tensors[0]
    assert first is not None
    recorder = recorders.current
    _set_allocator()
    if not (_REMEMBERS and first.is_cuda) or is_hooked():
        run_by_triton = functools.partial(_run, kernel[(programs,)], (*sizes, *constants), dict(config))
        if recorder is None:
            run_by_triton(*tensors)
        else:
            recorder.launch_by_triton(run_by_triton, tensors)
        return
    device = first.get_device()
    pointers: list[int | None] = []
    kinds: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            pointers.append(None)
            kinds.append(None)
        else:
            pointers.append(pointer := tensor.data_ptr())
            kinds.append((tensor.dtype,) if pointer & 15 else tensor.dtype)
    key = (kernel.fn, device, sizes, constants, *config, *config.values(), *kinds)
    answer = _launches.get(key)
    if answer is None:
        choice = (device, *_specialization(kernel, kinds, sizes, constants, config))
        answer = _binaries.get(choice)
        if answer is None:
            compiled = kernel[(programs,)](*tensors, *sizes, *constants, **config)
            names = kernel.arg_names[len(tensors) + len(sizes) + len(constants) :]  # compiled in, but counted
            rest = (*constants, *(config[name] for name in names))
            answer = compiled.run, compiled.function, compiled.packed_metadata, rest
            _binaries[choice] = answer
            if recorder is not None:
                recorder.launched(answer, programs, tensors, sizes)
            return
        if len(_launches) >= MOST_LAUNCHES:
            _launches.clear()
        _launches[key] = answer
    if recorder is not None:
        recorder.launched(answer, programs, tensors, sizes)
    run, function, metadata, rest = answer
    stream = driver.active.get_current_stream(device)
    run(programs, 1, 1, stream, function, metadata, None, None, None, *pointers, *sizes, *rest)


def _specialization(
    kernel: Any,
    kinds: Sequence[Any],
    sizes: tuple[int, ...],
    constants: tuple[Any, ...],
    config: Mapping[str, int],
) -> tuple[Any, ...]:
    """At least as fine as Triton's choice of a binary. ``kinds``: a tensor's dtype, in a tuple if it is not aligned."""
    return (
        kernel.fn,
        constants,
        tuple(config.items()),
        *kinds,
        *[(size == 1, size & 15 == 0, size >> 31) for size in sizes],
    )


def _run(kernel: Any, values: tuple[Any, ...], options: Mapping[str, int], *tensors: torch.Tensor | None) -> None:
    kernel(*tensors, *values, **options)


def current_stream(tensor: torch.Tensor) -> int:
    """Return the stream that kernels are launched on; prepare this thread for launches."""
    _set_allocator()
    stream: int = driver.active.get_current_stream(tensor.get_device()) if tensor.is_cuda else 0
    return stream


def _set_allocator() -> None:
    if _allocation._allocator.get() is _NO_ALLOCATOR:  # of this thread: autograd has its own
        triton.set_allocator(_scratch)


def is_hooked() -> bool:
    """Return True if a profiler or a debugger listens: Triton's own way serves them."""
    runtime = knobs.runtime
    return bool(
        runtime.launch_enter_hook.calls
        or runtime.launch_exit_hook.calls
        or runtime.add_stages_inspection_hook
        or runtime.debug
        or knobs.compilation.instrumentation_mode
    )


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory of the current device, which torch's allocator gives away again in the order of the stream."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
