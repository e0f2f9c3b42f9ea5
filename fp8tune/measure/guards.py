"""Tensors between guard bytes: memory that belongs to no tensor, where a write or a read past an end shows.

A kernel that writes one element too many changes nothing that a comparison of outputs sees, but a neighbour's tensor in
training. One that reads too many is right as long as its neighbour happens to be.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from fp8tune.replay.lazy import torch

# On either side of a tensor: the CUDA allocator's alignment of large blocks, so that guards do not move a tensor.
GPU_GUARD_BYTES = 2 << 20
CPU_GUARD_BYTES = 256 << 10  # problems are small there, and to paint and read 2 MiB took a quarter of a check
FILL = 0xA5
LARGE = 0x7B  # in every byte: a large finite value of every floating-point type, positive as an integer too

# Beside inputs, in turn. NaN of every floating-point type, then values larger than any input; as integers minus one and
# zero, because a kernel that takes these for group ends does no harm.
_BESIDE_FLOATS = (0xFF, LARGE)
_BESIDE_INTEGERS = (0xFF, 0x00)

_CHUNK_WORDS = 1 << 20
_CHUNKS = 8  # that are multiplied at once, so that a GPU starts few products
_MULTIPLIER = 0x5851F42D4C957F2D  # odd, so that multiplying loses nothing


def is_tensor(value: Any) -> bool:
    """Return True for a torch tensor."""
    return isinstance(value, torch.Tensor)


def guard_bytes(device: Any) -> int:
    """Return the number of guard bytes on either side of a tensor on a device."""
    return CPU_GUARD_BYTES if torch.device(device).type == "cpu" else GPU_GUARD_BYTES


def guarded(like: Any, device: str, offset: int = 0) -> Any:
    """Return uninitialised memory with the shape, strides, dtype and storage of ``like``, between two guards.

    ``like`` may be on ``meta``. What its storage holds beyond its elements (padding) is the tensor's own, and so are
    ``offset`` elements before it.
    """
    size, guard = like.element_size(), guard_bytes(device)
    own = offset * size + like.untyped_storage().nbytes()
    memory = torch.empty(guard + own + guard, dtype=torch.uint8, device=device)
    whole = memory[: memory.numel() // size * size].view(like.dtype)
    return whole.as_strided(like.shape, like.stride(), guard // size + offset + like.storage_offset())


def guarded_copy(tensor: Any, offset: int = 0) -> Any:
    """Copy a tensor between two guards on its device, ``offset`` elements past an aligned address."""
    copy = guarded(tensor, tensor.device, offset)
    own, before = own_bytes(copy), offset * tensor.element_size()
    own[:before] = FILL
    own[before:] = storage(tensor)
    return copy


def with_storage(tensor: Any) -> Any:
    """Copy a tensor with all of its storage, so that the copy begins at the same place in it."""
    memory, size = storage(tensor).clone(), tensor.element_size()
    whole = memory[: len(memory) // size * size].view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def own_bytes(tensor: Any) -> Any:
    """Return the memory between the guard bytes that :func:`guarded` put around a tensor."""
    guard = guard_bytes(tensor.device)
    return storage(tensor)[guard:-guard]


def fill(tensor: Any, byte: int = FILL) -> None:
    """Paint the guard bytes that :func:`guarded` put around a tensor."""
    memory, guard = storage(tensor), guard_bytes(tensor.device)
    memory[:guard].fill_(byte)
    memory[-guard:].fill_(byte)


def overwritten(tensor: Any, byte: int = FILL) -> str | None:
    """Describe guard bytes that were overwritten; None if there are none."""
    memory, size = storage(tensor), guard_bytes(tensor.device)
    for side, guard in (("after", memory[-size:]), ("before", memory[:size])):
        least, most = guard.aminmax()  # a hundred times as fast on a CPU as a comparison of each byte
        if bool(least == byte) and bool(most == byte):
            continue
        hits = (guard != byte).nonzero()
        if side == "after":
            return f"{len(hits)} bytes written past its end, the first {int(hits[0])} bytes after it"
        return f"{len(hits)} bytes written before its start, the last {size - int(hits[-1])} bytes before it"
    return None


def is_overwritten(tensor: Any, byte: int = FILL) -> Any:
    """Return a tensor that is true if :func:`overwritten` has something to say. Nothing waits for the device."""
    memory, size = storage(tensor), guard_bytes(tensor.device)
    return torch.stack([*memory[:size].aminmax(), *memory[-size:].aminmax()]).ne(byte).any()


def fingerprint(tensor: Any) -> Any:
    """Return 64 bits of everything between the guard bytes of a tensor, on its device and without waiting for it.

    One changed word always changes them; several changed words leave them equal once in about 2 ** 60 times.
    """
    own, weights = own_bytes(tensor), _weights(tensor.device)
    whole = len(own) // 8 * 8
    tail = torch.zeros(8, dtype=torch.uint8, device=own.device)
    tail[: len(own) - whole] = own[whole:]
    words = own[:whole].view(torch.int64)
    chunked = len(words) // _CHUNK_WORDS * _CHUNK_WORDS
    chunks, rest = words[:chunked].view(-1, _CHUNK_WORDS), words[chunked:]
    sums = [(some * weights).sum(dim=1) for some in chunks.split(_CHUNKS)]
    if len(rest) or not chunked:
        sums.append((rest * weights[: len(rest)]).sum(dim=0, keepdim=True))
    values = torch.cat([tail.view(torch.int64), *sums])
    return (values * _powers(len(values), own.device)).sum()  # modulo 2 ** 64


class InputWatch:
    """Inputs between guard bytes, with the fingerprints that they should have. ``build`` makes them anew."""

    def __init__(self, build: Callable[[], tuple[Any, ...]]) -> None:
        self._build = build
        self.inputs = build()
        self._tensors = {index: value for index, value in enumerate(self.inputs) if is_tensor(value)}
        self._prints = {index: fingerprint(tensor) for index, tensor in self._tensors.items()}
        self.begin(0)

    def begin(self, number: int) -> None:
        """Paint bytes beside the inputs, other ones than for the number before."""
        self._number = number % 2
        for tensor in self._tensors.values():
            fill(tensor, self._beside(tensor))

    def faults(self) -> list[Any]:
        """Return tensors that are true if :meth:`written` has something to say. Nothing waits for the device."""
        changed = [fingerprint(tensor) != self._prints[index] for index, tensor in self._tensors.items()]
        return changed + [is_overwritten(tensor, self._beside(tensor)) for tensor in self._tensors.values()]

    def written(self) -> str | None:
        """Name an input that was written, or return None. All inputs are restored afterwards."""
        for index, tensor in self._tensors.items():
            fault = None
            if bool(fingerprint(tensor) != self._prints[index]):
                fault = f"input {index} was written"
            elif beside := overwritten(tensor, self._beside(tensor)):
                fault = f"input {index}: {beside}"
            if fault:
                right = self._build()
                for number, damaged in self._tensors.items():
                    own_bytes(damaged).copy_(own_bytes(right[number]))
                    fill(damaged, self._beside(damaged))
                return fault
        return None

    def _beside(self, tensor: Any) -> int:
        return (_BESIDE_FLOATS if tensor.is_floating_point() else _BESIDE_INTEGERS)[self._number]


def storage(tensor: Any) -> Any:
    """Return the memory of a tensor, guards included, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@cache
def _weights(device: Any) -> Any:
    """Return odd numbers, so that a changed word changes its product."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(-(2**62), 2**62, (_CHUNK_WORDS,), device=device, generator=generator) * 2 + 1


@cache
def _powers(count: int, device: Any) -> Any:
    """Return so many powers of the multiplier, modulo 2 ** 64, from the highest down to one."""
    factors = torch.full((count,), _MULTIPLIER, device=device)
    factors[0] = 1
    return factors.cumprod(0).flip(0)
