"""Launch a kernel again without having Triton find out again which binary it is.

``kernel[grid](...)`` binds and specializes every argument at each call: half of the host time of an operator. Here a
binary is remembered by all that Triton chose it by, and goes to Triton's launcher, with pointers as integers, which
spares the driver a question for each.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import _allocation, driver

__all__ = ["Launch", "Recorded", "launch_kernel", "recording", "remembers", "zeros"]

_REMEMBERS = torch.version.cuda is not None
"""On AMD Triton specializes on more than this module knows of: on tensors below 2 GiB."""

_NO_ALLOCATOR = _allocation._NULL_ALLOCATOR

_binaries: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Key -> (the compiled kernel, its arguments that follow the sizes)."""


def launch_kernel(
    kernel: Any,
    programs: int,
    tensors: Sequence[torch.Tensor | None],
    sizes: Sequence[int],
    constants: tuple[Any, ...],
    config: Mapping[str, int],
) -> None:
    """``kernel[(programs,)](*tensors, *sizes, *constants, **config)``, faster from the second time on.

    All tensors are on the current device, and the first is not None. An argument keeps its type: ``True`` and ``1``
    count as the same. Tensor descriptors that a kernel makes lie in memory of torch's.
    """
    first = tensors[0]
    assert first is not None
    if _allocation._allocator.get() is _NO_ALLOCATOR:  # of this thread: autograd has its own
        triton.set_allocator(_scratch)
    if not (_REMEMBERS and first.is_cuda) or _hooked():
        kernel[(programs,)](*tensors, *sizes, *constants, **config)
        return
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    device = first.get_device()
    key = (device, *_specialization(kernel, tensors, pointers, sizes, constants, config))
    found = _binaries.get(key)
    recorded = _recorder.recorded
    if found is None:
        if recorded is not None:
            recorded.is_partial = True
        compiled = kernel[(programs,)](*tensors, *sizes, *constants, **config)
        names = kernel.arg_names[len(tensors) + len(sizes) + len(constants) :]  # compiled in, but the launcher counts
        _binaries[key] = compiled, (*constants, *(config[name] for name in names))
        return
    compiled, rest = found
    if recorded is not None:
        recorded.tensors += [tensor for tensor in tensors if tensor is not None]
        recorded.launches.append((Launch(compiled, programs, (*sizes, *rest), device), tuple(pointers)))
    stream = driver.active.get_current_stream(device)
    compiled.run(
        programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *pointers, *sizes, *rest
    )


class Launch:
    """A launch that was recorded, to be repeated on other pointers."""

    __slots__ = ("_compiled", "_device", "_programs", "_rest")

    def __init__(self, compiled: Any, programs: int, rest: tuple[Any, ...], device: int) -> None:
        self._compiled, self._programs, self._rest, self._device = compiled, programs, rest, device

    def __call__(self, pointers: Sequence[int | None]) -> None:
        """On the current device, which is the one it was recorded on."""
        kernel, stream = self._compiled, driver.active.get_current_stream(self._device)
        options = kernel.function, kernel.packed_metadata, None, None, None
        kernel.run(self._programs, 1, 1, stream, *options, *pointers, *self._rest)


@dataclass
class Recorded:
    """All that :func:`launch_kernel` launched, in order."""

    launches: list[tuple[Launch, tuple[int | None, ...]]] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    """What launches were given: held, so that no two of them lie at the same address."""
    zeros: set[int] = field(default_factory=set)
    """Addresses of those that began as zeros."""
    is_partial: bool = False
    """A kernel was compiled or goes Triton's own way."""


class _Recorder(threading.local):
    recorded: Recorded | None = None


_recorder = _Recorder()


@contextmanager
def recording() -> Iterator[Recorded]:
    """Record what this thread launches."""
    recorded = _recorder.recorded = Recorded()
    try:
        yield recorded
    finally:
        _recorder.recorded = None


def remembers() -> bool:
    """Whether launches of remembered binaries may be repeated; lets them have memory for tensor descriptors."""
    if _allocation._allocator.get() is _NO_ALLOCATOR:
        triton.set_allocator(_scratch)
    return _REMEMBERS and not _hooked()


def zeros(count: int, device: torch.device) -> torch.Tensor:
    """Zeros that a kernel counts in, int32."""
    found = torch.zeros(count, dtype=torch.int32, device=device)
    if _recorder.recorded is not None:
        _recorder.recorded.zeros.add(found.data_ptr())
    return found


def _specialization(
    kernel: Any,
    tensors: Sequence[torch.Tensor | None],
    pointers: Sequence[int | None],
    sizes: Sequence[int],
    constants: tuple[Any, ...],
    config: Mapping[str, int],
) -> tuple[Any, ...]:
    """At least as fine as Triton's choice of a binary."""
    return (
        kernel.fn,
        constants,
        tuple(config.items()),
        *[None if tensor is None else tensor.dtype for tensor in tensors],
        *[pointer is not None and pointer & 15 == 0 for pointer in pointers],
        *[(size == 1, size & 15 == 0, size >> 31) for size in sizes],
    )


def _hooked() -> bool:
    """Whether a profiler or a debugger listens: Triton's own way serves them."""
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
