"""Fingerprints of weights, by which a change after quantization is noticed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Fingerprint", "cast_dtype", "change_message"]

SAMPLES = 2**16
"""Elements of a weight that are compared, at least 256 of each expert. In bfloat16 a small step of an optimizer changes
few elements: where it changes one in a thousand, the probability to miss it is exp(-65)."""

SAMPLES_OF_EXPERT = 256


class Fingerprint:
    """Sampled elements of weights, the version that torch counts, and the dtype that the weights were cast to."""

    name: str
    """Name of the weights in messages."""
    dtype: torch.dtype
    """Dtype they were quantized from: that of the weights, or of the autocast region."""

    def __init__(self, w: Tensor, name: str) -> None:
        """Take the fingerprint of weights (E, N, K) that lie row-major, or of their transposed view."""
        self.name, self._w = name, w
        with torch.inference_mode(False):
            self._sampled = self._sample().clone()
        self._note()

    def renew(self) -> None:
        """Take the fingerprint of the weights as they are now, into the same memory."""
        self._note()
        with torch.no_grad(), torch.inference_mode(False):
            sampled = self._sample()
            if sampled.dtype != self._sampled.dtype:  # the weights were cast
                self._sampled = sampled.clone()
            self._sampled.copy_(sampled)

    def is_of(self, w: Tensor) -> bool:
        """Return True if ``w`` is the parameter that was quantized."""
        return w is self._w

    def changed(self) -> Tensor:
        """Return a boolean on the device: sampled elements differ from those of the fingerprint."""
        with torch.inference_mode(False):
            if self._kind != _kind(self._w):
                return torch.ones((), dtype=torch.bool, device=self._w.device)
            return (self._sample() != self._sampled).any()

    def check_use(self) -> None:
        """Raise RuntimeError if the weights are known to have changed, or are cast to another dtype here."""
        if (dtype := cast_dtype(self._w)) != self.dtype:
            made = f"{self.name} was quantized from {self.dtype} and would be cast to {dtype} here"
            raise RuntimeError(f"{made}: quantize it in that autocast region, or give weights_once that dtype")
        if not torch.compiler.is_compiling() and (self._w._version, self._w.data_ptr()) != self._identity:
            raise RuntimeError(change_message([self.name]))

    def _note(self) -> None:
        self.dtype, self._kind = cast_dtype(self._w), _kind(self._w)
        self._identity = self._w._version, self._w.data_ptr()

    def _sample(self) -> Tensor:
        """Return elements of every expert at equal distances, as integers: bits are compared, NaN is a value."""
        experts = (self._w if self._w.is_contiguous() else self._w.mT).detach().flatten(1)
        count, size = experts.shape
        wanted = max(-(-SAMPLES // count), SAMPLES_OF_EXPERT)
        distance = max(size // wanted, 1) - 1 | 1  # odd: rows are multiples of 16, and one column would be all
        bits = torch.int16 if experts.element_size() == 2 else torch.int32
        return experts.view(bits)[:, ::distance]


def change_message(names: list[str]) -> str:
    """Say which weights changed while their FP8 values were in use."""
    more = f" and {len(names) - 1} more" if names[1:] else ""
    effect = "so FP8 results are of old weights: change weights after the with block ends"
    return f"{names[0]}{more} changed after quantization, {effect}"


def cast_dtype(w: Tensor) -> torch.dtype:
    """Return what ``fp8_grouped_mm`` would quantize from here: the autocast region's dtype, or that of ``w``."""
    if not w.is_meta and torch.is_autocast_enabled(w.device.type):
        return torch.get_autocast_dtype(w.device.type)
    return w.dtype


def _kind(w: Tensor) -> tuple[Any, ...]:
    return w.shape, w.dtype, w.device
