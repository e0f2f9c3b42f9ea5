"""A watch over inputs that lie between guard bytes: whether a launch wrote to them or beside them."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from fp8tune.measure import edges, guards
from fp8tune.measure.comparing import LARGE
from fp8tune.measure.lazy import torch
from fp8tune_kernels.spec import Edge, KernelSpec

# Beside inputs, in turn. NaN of every floating-point type, then values larger than any input; as integers minus one and
# zero, because a kernel that takes these for group ends does no harm.
_BESIDE_FLOATS = (0xFF, LARGE)
_BESIDE_INTEGERS = (0xFF, 0x00)

_CHUNK_WORDS = 1 << 20
_MULTIPLIER = 0x5851F42D4C957F2D  # odd, so that multiplying loses nothing


class InputWatch:
    """The inputs of an edge, with the fingerprints that they should have."""

    def __init__(self, spec: KernelSpec, edge: Edge, device: str) -> None:
        self._rebuild = partial(edges.inputs, spec, edge, device)
        self.inputs = self._rebuild()
        self._tensors = {index: value for index, value in enumerate(self.inputs) if is_tensor(value)}
        self._prints = {index: fingerprint(tensor) for index, tensor in self._tensors.items()}
        self.begin(0)

    def begin(self, number: int) -> None:
        """Paint bytes beside the inputs, other ones than for the number before."""
        self._number = number % 2
        for tensor in self._tensors.values():
            guards.fill(tensor, self._beside(tensor))

    def written(self) -> str | None:
        """Name an input that was written, or return None. All inputs are restored afterwards."""
        for index, tensor in self._tensors.items():
            fault = None
            if fingerprint(tensor) != self._prints[index]:
                fault = f"input {index} was written"
            elif beside := guards.overwritten(tensor, self._beside(tensor)):
                fault = f"input {index}: {beside}"
            if fault:
                right = self._rebuild()
                for number, damaged in self._tensors.items():
                    guards.own_bytes(damaged).copy_(guards.own_bytes(right[number]))
                    guards.fill(damaged, self._beside(damaged))
                return fault
        return None

    def _beside(self, tensor: Any) -> int:
        return (_BESIDE_FLOATS if tensor.is_floating_point() else _BESIDE_INTEGERS)[self._number]


def is_tensor(value: Any) -> bool:
    """Return True for a torch tensor."""
    return isinstance(value, torch.Tensor)


def fingerprint(tensor: Any) -> int:
    """Return 64 bits of everything between the guard bytes of a tensor.

    One changed word always changes them; several changed words leave them equal once in about 2 ** 60 times.
    """
    own = guards.own_bytes(tensor)
    whole = len(own) // 8 * 8
    tail = torch.zeros(8, dtype=torch.uint8, device=own.device)
    tail[: len(own) - whole] = own[whole:]
    total = tail.view(torch.int64)[0]
    for words in own[:whole].view(torch.int64).split(_CHUNK_WORDS):
        total = total * _MULTIPLIER + (words * _weights(own.device)[: len(words)]).sum()  # modulo 2 ** 64
    return int(total)


@cache
def _weights(device: Any) -> Any:
    """Return odd numbers, so that a changed word changes its product."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(-(2**62), 2**62, (_CHUNK_WORDS,), device=device, generator=generator) * 2 + 1
