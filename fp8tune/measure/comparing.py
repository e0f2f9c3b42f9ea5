"""Comparison of outputs with a reference, and values that cannot be right: for each of three checks.

Outputs may fill much of a GPU. Whatever takes more than a few bytes an element is computed in pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fp8tune.measure.guards import LARGE
from fp8tune.replay.case import bits as bits
from fp8tune.replay.lazy import torch
from fp8tune_kernels.spec import KernelSpec, Tolerance

_PIECE_ELEMENTS = 1 << 22  # within a tolerance 200 MiB


@dataclass(frozen=True)
class Rule:
    """Rule by which an output's element is right."""

    # Any NaN equals any NaN in every type: which one a sum gives depends on its order. In float32 it always does, as
    # payloads differ between backends.
    any_nan: bool = False
    tolerance: Tolerance | None = None  # of floating-point outputs; the others are equal

    @classmethod
    def from_spec(cls, spec: KernelSpec) -> Rule:
        """Return the rule that a spec declares."""
        return cls(spec.check != "exact" or bool(spec.recorded), spec.tolerance if spec.check == "tolerance" else None)

    def difference(self, output: Any, expected: Any) -> str | None:
        """Describe the difference, with the place and the values of one element; None if everything is right."""
        if not self._has_bound(output):
            return self._unequal(output, expected) if bool(self.comparison(output, expected)()) else None
        count, worst, size = 0, (-1.0, 0.0, ()), self._size(expected)
        for start, values, right in _pieces(output, expected):
            wrong, errors, allowed = self._errors(values, right, size)
            if in_piece := int(wrong.sum()):
                count += in_piece
                at = _position(errors.masked_fill(~wrong, -1))
                position = tuple(begin + index for begin, index in zip(start, at, strict=True))
                worst = max(worst, (float(errors[at]), float(allowed[at]), position))
        if not count:
            return None
        error, allowance, position = worst
        return (
            f"{count} of {expected.numel()} elements are out of bound, the largest error at {position}: "
            f"expected {expected[position].item():.9g}, got {output[position].item():.9g}, off by {error:.6g} "
            f"where {allowance:.6g} is allowed ({self.tolerance})"
        )

    def _unequal(self, output: Any, expected: Any) -> str:
        """Count the elements that differ, in pieces: on a GPU a count takes 8 bytes an element."""
        pieces = ((start, self.wrong(values, right)) for start, values, right in _pieces(output, expected))
        counts = [(int(unequal.sum()), start, _position(unequal)) for start, unequal in pieces]
        wrong = [(start, at) for count, start, at in counts if count]
        if not wrong:
            return "elements differed after the launch and then did not: it must write on the current stream"
        first = min(tuple(begin + index for begin, index in zip(start, at, strict=True)) for start, at in wrong)
        differ = f"{sum(count for count, *_ in counts)} of {expected.numel()} elements differ, first at {first}"
        return f"{differ}: expected {_number(expected[first])}, got {_number(output[first])}"

    def comparison(self, output: Any, expected: Any) -> Callable[[], Any]:
        """Return a function whose result, a tensor on the device, is true if any element is wrong.

        Nothing waits for the device. The function is called for many launches, so views are made here.
        """
        if output.dtype == expected.dtype and not self._accepts_any_nan(output):
            # At once, 8 bytes a word: in pieces, 150 launches on 370 MB took half a second on an H100 to enqueue.
            words, right_words = _words(output, expected)
            return lambda: words.ne(right_words).any()
        pieces, size = [piece[1:] for piece in _pieces(output, expected)], self._size(expected)
        return lambda: torch.stack([self.wrong(values, right, size).any() for values, right in pieces]).any()

    def wrong(self, output: Any, expected: Any, size: Any = None) -> Any:
        """Return a mask of the elements that are wrong; within a tolerance it takes 50 bytes an element.

        ``size``: the root mean square of all expected elements, if these are a part of them.
        """
        if self._has_bound(output):
            return self._errors(output, expected, size)[0]
        if output.dtype != expected.dtype:
            return output != expected
        unequal = bits(output) != bits(expected)
        if self._accepts_any_nan(expected):
            unequal &= ~(output.isnan() & expected.isnan())
        return unequal

    def spoiler(self, output: Any, expected: Any) -> Callable[[int], object]:
        """Return a function that writes values which cannot be right, and is called for many launches.

        For odd numbers they are large, for even ones such that no bit or bound accepts them.
        """
        values, large = bits(output), _large(output)
        if self._has_bound(output):
            unbound = [(part, ~finite.double().isfinite()) for _, part, finite in _pieces(values, expected)]

            def break_bits() -> None:
                output.fill_(float("nan"))
                for part, mask in unbound:
                    part.masked_fill_(mask, large)

        elif output.dtype == expected.dtype:
            right = bits(expected)

            def break_bits() -> None:
                torch.bitwise_not(right, out=values)

        else:  # integers, whose reference has a wider type

            def break_bits() -> None:
                output.copy_(expected).bitwise_not_()

        return lambda number: values.fill_(large) if number % 2 else break_bits()

    def _has_bound(self, output: Any) -> bool:
        return self.tolerance is not None and bool(output.is_floating_point())

    def _accepts_any_nan(self, output: Any) -> bool:
        return self._has_bound(output) or self.any_nan or output.dtype == torch.float32

    def _size(self, expected: Any) -> Any:
        """Return the root mean square of an output that has a bound relative to it, remembered; None for others."""
        if self.tolerance is None or not self.tolerance.rms or not expected.is_floating_point():
            return None
        sizes = _sizes()
        if expected not in sizes:  # the same output is compared with 150 launches
            total = torch.zeros((), dtype=torch.float64, device=expected.device)
            count = torch.zeros((), dtype=torch.int64, device=expected.device)
            for _, right in _pieces(expected):
                total += right.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).square().sum()
                count += right.isfinite().sum()
            sizes[expected] = total.div(count.clamp(min=1)).sqrt()
        return sizes[expected]

    def _errors(self, output: Any, expected: Any, size: Any = None) -> tuple[Any, Any, Any]:
        """Return which elements are wrong, by how much (infinity for an unexpected NaN), and the allowed errors.

        An infinity is right where the expected value rounds to it in the output's type.
        """
        assert self.tolerance is not None
        rounded, values, right = expected.to(output.dtype).double(), output.double(), expected.double()
        right = torch.where(rounded.isinf(), rounded, right)
        errors = (values - right).abs_()
        errors.masked_fill_((values == right) | (values.isnan() & right.isnan()), 0).nan_to_num_(nan=float("inf"))
        allowed = self.tolerance.allowed(right, size)
        is_within = (errors <= allowed) & right.isfinite()
        return ~is_within & (errors > 0), errors, allowed


EXACT = Rule()  # equal bytes


@functools.cache
def _sizes() -> Any:
    """Return a dictionary of expected output -> its root mean square."""
    return torch.utils.weak.WeakIdKeyDictionary()


def fill_large(output: Any) -> None:
    """Fill a tensor with :data:`LARGE`."""
    bits(output).fill_(_large(output))


def _large(output: Any) -> int:
    return int.from_bytes(bytes([LARGE] * output.element_size()))


def _words(*tensors: Any) -> list[Any]:
    """Return the bits of tensors of one dtype and shape, in words of 8 bytes if all are dense in the same order."""
    as_bits = [bits(tensor) for tensor in tensors]
    order = sorted(range(as_bits[0].ndim), key=as_bits[0].stride, reverse=True)
    dense = [tensor.permute(order) for tensor in as_bits]
    for tensor in dense:
        is_whole = tensor.is_contiguous() and tensor.nbytes % 8 == tensor.data_ptr() % 8 == 0
        if not is_whole or tensor.storage_offset() * tensor.itemsize % 8:
            return as_bits
    return [tensor.reshape(-1).view(torch.int64) for tensor in dense]


def _pieces(*tensors: Any) -> Iterator[tuple[Any, ...]]:
    """Yield tensors of one shape in pieces along their longest dim, each after the position where the pieces start."""
    shape, count = tensors[0].shape, tensors[0].numel()
    if count <= _PIECE_ELEMENTS:
        yield (0,) * len(shape), *tensors
        return
    dim = max(range(len(shape)), key=shape.__getitem__)
    length = max(1, _PIECE_ELEMENTS * shape[dim] // count)
    for begin in range(0, shape[dim], length):
        start = tuple(begin if axis == dim else 0 for axis in range(len(shape)))
        yield start, *(tensor.narrow(dim, begin, min(length, shape[dim] - begin)) for tensor in tensors)


def _position(values: Any) -> tuple[int, ...]:
    """Return the position of the largest element; of a mask, that of the first true one."""
    flat = (values.view(torch.uint8) if values.dtype == torch.bool else values).flatten()
    return tuple(map(int, torch.unravel_index(flat.argmax(), values.shape)))


def _number(element: Any) -> str:
    """Format a number with its bits."""
    size, value = element.element_size(), element.item()
    number = f"{value:.6g}" if isinstance(value, float) else str(value)
    return f"{number} (0x{int(bits(element)) & (1 << 8 * size) - 1:0{2 * size}x})"
