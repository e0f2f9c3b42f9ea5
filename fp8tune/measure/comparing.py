"""Which elements of an output are right, and what cannot be: for each of the three kinds of right.

Outputs may fill much of a GPU. What takes more than a few bytes an element, float64 above all, is computed in pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fp8tune_kernels.spec import KernelSpec, Tolerance

__all__ = ["EXACT", "LARGE", "Rule", "bits", "fill_large"]

LARGE = 0x7B
"""In every byte: a large finite value of every floating-point type, positive as an integer too."""

_ELEMENTS_AT_ONCE = 1 << 22
"""Within a tolerance 200 MiB."""


@dataclass(frozen=True)
class Rule:
    """When an output's element is right."""

    any_nan: bool = False
    """Any NaN equals any NaN in every type: which one a sum gives depends on its order. In float32 it always does, as
    payloads differ between backends."""
    tolerance: Tolerance | None = None
    """Of floating-point outputs; the others are equal."""

    @classmethod
    def of(cls, spec: KernelSpec) -> Rule:
        """The rule that a spec declares."""
        return cls(spec.check != "exact" or bool(spec.recorded), spec.tolerance if spec.check == "tolerance" else None)

    def difference(self, output: Any, expected: Any) -> str | None:
        """What is wrong with an output, with the place and the values of an element; None where all is right."""
        if self._bound(output) is not None:
            return self._beyond(output, expected)
        unequal = self._unequal(output, expected)
        count = int(unequal.sum())
        if not count:
            return None
        first = _first(unequal)
        return (
            f"{count} of {expected.numel()} elements differ, first at {first}: "
            f"expected {_shown(expected[first])}, got {_shown(output[first])}; {_largest(output, expected, unequal)}"
        )

    def differs(self, output: Any, expected: Any) -> Any:
        """Whether any element is wrong, as a tensor on their device: nothing waits for it.

        Bits are compared at once, eight bytes at a time where the memory allows it. In pieces of 4 million elements 150
        launches on 370 MB took half a second on an H100, most of it to enqueue the comparisons.
        """
        import torch

        if output.dtype == expected.dtype and not self._grants_nan(output):
            mine, theirs = _words(output, expected)
            return (mine != theirs).any()
        found, size = torch.zeros((), dtype=torch.bool, device=output.device), self._size(expected)
        for _, got, right in _pieces(output, expected):
            found |= self.wrong(got, right, size).any()
        return found

    def wrong(self, output: Any, expected: Any, size: Any = None) -> Any:
        """Which elements are wrong; within a tolerance it takes 50 bytes an element.

        ``size``: the root mean square of all expected elements, where these are a part of them.
        """
        is_exact = self._bound(output) is None
        return self._unequal(output, expected) if is_exact else self._errors(output, expected, size)[0]

    def spoil(self, output: Any, expected: Any, number: int = 0) -> None:
        """Write into an output what cannot be right: a large value, or for even numbers what no bit or bound grants."""
        import torch

        if number % 2:
            fill_large(output)
        elif self._bound(output) is None and output.dtype == expected.dtype:
            torch.bitwise_not(bits(expected), out=bits(output))
        elif self._bound(output) is None:  # integers, whose reference has a wider type
            output.copy_(expected).bitwise_not_()
        else:
            output.fill_(float("nan"))
            for _, got, right in _pieces(bits(output), expected):
                got.masked_fill_(~right.double().isfinite(), _large(output))

    def _bound(self, output: Any) -> Tolerance | None:
        return self.tolerance if output.is_floating_point() else None

    def _grants_nan(self, output: Any) -> bool:
        """Whether elements may be right whose bits differ."""
        import torch

        return self._bound(output) is not None or self.any_nan or output.dtype == torch.float32

    def _unequal(self, output: Any, expected: Any) -> Any:
        if output.dtype != expected.dtype:
            return output != expected
        unequal = bits(output) != bits(expected)
        if self._grants_nan(expected):
            unequal &= ~(output.isnan() & expected.isnan())
        return unequal

    def _size(self, expected: Any) -> Any:
        """Return the root mean square of an output that has a bound relative to it, remembered; None for others."""
        if self.tolerance is None or not self.tolerance.rms or not expected.is_floating_point():
            return None
        import torch

        sizes = _sizes()
        if expected not in sizes:  # the same is compared with 150 launches
            total = torch.zeros((), dtype=torch.float64, device=expected.device)
            count = torch.zeros((), dtype=torch.int64, device=expected.device)
            for _, _, right in _pieces(expected, expected):
                total += right.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).square().sum()
                count += right.isfinite().sum()
            sizes[expected] = total.div(count.clamp(min=1)).sqrt()
        return sizes[expected]

    def _errors(self, output: Any, expected: Any, size: Any = None) -> tuple[Any, Any, Any]:
        """Which elements are wrong, by how much (infinity for a NaN in vain), and how much is allowed.

        An infinity is right where the expected value rounds to it in the output's type.
        """
        import torch

        assert self.tolerance is not None
        rounded, got, right = expected.to(output.dtype).double(), output.double(), expected.double()
        right = torch.where(rounded.isinf(), rounded, right)
        errors = (got - right).abs_()
        errors.masked_fill_((got == right) | (got.isnan() & right.isnan()), 0).nan_to_num_(nan=float("inf"))
        allowed = self.tolerance.allowed(right, size)
        is_within = (errors <= allowed) & right.isfinite()
        return ~is_within & (errors > 0), errors, allowed

    def _beyond(self, output: Any, expected: Any) -> str | None:
        count, worst, size = 0, (-1.0, 0.0, ()), self._size(expected)
        for start, got, right in _pieces(output, expected):
            wrong, errors, allowed = self._errors(got, right, size)
            if found := int(wrong.sum()):
                count += found
                at = _first(errors.masked_fill(~wrong, -1), largest=True)
                place = tuple(begin + index for begin, index in zip(start, at, strict=True))
                worst = max(worst, (float(errors[at]), float(allowed[at]), place))
        if not count:
            return None
        error, allowance, place = worst
        return (
            f"{count} of {expected.numel()} elements are out of bound, the largest error at {place}: "
            f"expected {expected[place].item():.9g}, got {output[place].item():.9g}, off by {error:.6g} "
            f"where {allowance:.6g} is allowed ({self.tolerance})"
        )


@functools.cache
def _sizes() -> Any:
    """Return a dictionary of expected output -> its root mean square."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()


EXACT = Rule()
"""Equal bytes."""


def bits(tensor: Any) -> Any:
    """The tensor's bits as integers of the same size: shares its memory, keeps its strides."""
    import torch

    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _words(*tensors: Any) -> list[Any]:
    """The bits of tensors of one dtype and shape, as integers of eight bytes where all are dense in the same order."""
    import torch

    found = [bits(tensor) for tensor in tensors]
    order = sorted(range(found[0].ndim), key=found[0].stride, reverse=True)
    flat = [each.permute(order) for each in found]
    is_whole = all(each.is_contiguous() and each.nbytes % 8 == each.data_ptr() % 8 == 0 for each in flat)
    if not is_whole or any(each.storage_offset() * each.itemsize % 8 for each in flat):
        return found
    return [each.reshape(-1).view(torch.int64) for each in flat]


def fill_large(output: Any) -> None:
    """Fill a tensor with :data:`LARGE`."""
    bits(output).fill_(_large(output))


def _large(output: Any) -> int:
    return int.from_bytes(bytes([LARGE] * output.element_size()))


def _pieces(*tensors: Any) -> Iterator[tuple[Any, ...]]:
    """Tensors of one shape in pieces along their longest dim, each after the place where the pieces begin."""
    first = tensors[0]
    if first.numel() <= _ELEMENTS_AT_ONCE:
        yield (0,) * first.ndim, *tensors
        return
    dim = max(range(first.ndim), key=first.shape.__getitem__)
    length = max(1, _ELEMENTS_AT_ONCE * first.shape[dim] // first.numel())
    for begin in range(0, first.shape[dim], length):
        end = min(begin + length, first.shape[dim])
        start = tuple(begin if each == dim else 0 for each in range(first.ndim))
        yield start, *(each.narrow(dim, begin, end - begin) for each in tensors)


def _first(values: Any, largest: bool = False) -> tuple[int, ...]:
    """The place of the first true element, or of the largest."""
    import torch

    flat = values if largest else values.view(torch.uint8)
    place, found = int(flat.flatten().argmax()), []
    for size in reversed(values.shape):
        place, index = divmod(place, size)
        found.append(index)
    return tuple(reversed(found))


def _shown(element: Any) -> str:
    """A number with its bits."""
    mask = (1 << 8 * element.element_size()) - 1
    width = 2 * element.element_size()
    value = element.item()
    number = f"{value:.6g}" if isinstance(value, float) else str(value)
    return f"{number} (0x{int(bits(element)) & mask:0{width}x})"


def _largest(output: Any, expected: Any, unequal: Any) -> str:
    """The largest difference between finite elements."""
    largest = -1.0
    for _, got, right, where in _pieces(bits(output), bits(expected), unequal):
        gap = (got[where].view(output.dtype).double() - right[where].view(expected.dtype).double()).abs()
        gap = gap[gap.isfinite()]
        largest = max(largest, float(gap.max())) if gap.numel() else largest
    return f"largest difference {largest:.6g}" if largest >= 0 else "no difference is finite"
