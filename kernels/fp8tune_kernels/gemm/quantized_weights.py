"""FP8 snapshots of expert weights, for use by several micro-batches.

    for batch in batches:
        with quantize_weights(w) as experts:        # fp8_grouped_mm takes it in place of w.transpose(1, 2)
            for tokens in batch.split(...):
                fp8_grouped_mm(tokens, experts, offs)...backward()
        optimizer.step()

``colwise-3d`` and ``transpose-3d`` quantize for the two passes. The result takes 2 bytes an element.

A snapshot does not follow its weights. Leaving the ``with`` block, or :meth:`QuantizedWeights.check`, compares a sample
of the weights with the one that was taken when they were quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # as torch.compiler.disable, which takes a second to import
from torch.autograd.graph import increment_version

from ..catalog import RECIPES
from ..quantize import colwise_3d, transpose_3d_atomic, transposed_codes_3d
from ..runtime.checks import check_choice, check_weights, fp8_dtype_for
from ..runtime.ops import define
from .grouped_tiles import check_multiples

SAMPLES = 2**16
"""Elements of a weight that are compared, at least 256 of each expert. In bfloat16 a small step of an optimizer changes
few elements: where it changes one in a thousand, the probability to miss it is exp(-65)."""

SAMPLES_OF_EXPERT = 256


@_disable_dynamo  # addresses are read here
def quantize_weights(
    w: Tensor, *, float8_dtype: torch.dtype | None = None, recipe: str = "default", layout: str = "ENK"
) -> QuantizedWeights:
    """Take an FP8 snapshot of expert weights, which ``fp8_grouped_mm`` takes in place of ``B_t``.

    ``w``: the parameter, (E, N, K), row-major, or its view (E, K, N), strides (K*N, 1, K); bfloat16, float16 or
    float32. Gradients reach it. Under autocast it is cast first, as ``fp8_grouped_mm`` would.
    ``layout``: ``"EKN"`` for a row-major parameter (E, K, N), which is ``B_t`` itself, as gpt-oss keeps it.
    ``float8_dtype`` None is the format of the running arch. ``recipe``: the one of ``fp8_grouped_mm`` that multiplies.

    Raises ValueError, naming the argument: a wrong dtype, rank or stride; another recipe; N or K that is no multiple of
    16; a tensor made in inference mode, which has no version; a subclass such as DTensor. Not inside ``torch.compile``:
    give the result to what is compiled.
    """
    quantized = snapshot(w, float8_dtype, recipe, layout, "w")
    for tensor in quantized.codes:  # else mode="reduce-overhead" copies them at each call
        torch._dynamo.mark_static_address(tensor)
    return quantized


def snapshot(w: Tensor, float8_dtype: torch.dtype | None, recipe: str, layout: str, name: str) -> QuantizedWeights:
    """Quantize weights that messages call ``name``. Raises what :func:`quantize_weights` raises."""
    if float8_dtype not in (None, torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        raise ValueError(f"float8_dtype is {float8_dtype}, wanted None, torch.float8_e4m3fn or torch.float8_e4m3fnuz")
    check_choice("recipe", recipe, RECIPES)
    check_choice("layout", layout, ("ENK", "EKN"))
    if layout == "EKN" and recipe == "folded":
        raise ValueError("recipe is 'folded', wanted 'default' for layout 'EKN': no kernel folds their scales")
    if layout == "EKN" and w.dim() == 3 and not w.is_contiguous():
        raise ValueError(f"w has strides {w.stride()}, wanted row-major for layout 'EKN'")
    w = as_stored(w)
    return QuantizedWeights(w, fp8_dtype_for(w.device, float8_dtype), recipe, layout, name)


class Fingerprint:
    """Sampled elements of weights (E, N, K), row-major or their transposed view, and the version that torch counts."""

    dtype: torch.dtype
    """Dtype they were quantized from: that of the weights, or of the autocast region."""

    def __init__(self, w: Tensor, name: str) -> None:
        """``name``: that of the weights in messages."""
        self.name, self._w, self._sampled = name, w, w.new_empty(0)
        self.renew()

    def renew(self) -> None:
        """Take the fingerprint of the weights as they are now, into the same memory."""
        self.dtype, self._kind, self._identity = cast_dtype(self._w), self._kind_now(), self._identity_now()
        with torch.no_grad(), torch.inference_mode(False):
            sampled = self._sample()
            if (sampled.dtype, sampled.shape) != (self._sampled.dtype, self._sampled.shape):  # the weights were cast
                self._sampled = sampled.clone()
            self._sampled.copy_(sampled)

    def is_of(self, w: Tensor) -> bool:
        """Return True if ``w`` is the parameter that was quantized."""
        return w is self._w

    def changed(self) -> Tensor:
        """Return a boolean on the device: sampled elements differ from those of the fingerprint."""
        with torch.inference_mode(False):
            if self._kind != self._kind_now():
                return torch.ones((), dtype=torch.bool, device=self._w.device)
            return (self._sample() != self._sampled).any()

    def check_use(self) -> None:
        """Raise RuntimeError if the weights are known to have changed, or are cast to another dtype here."""
        if (dtype := cast_dtype(self._w)) != self.dtype:
            made = f"{self.name} was quantized from {self.dtype} and would be cast to {dtype} here"
            raise RuntimeError(f"{made}: quantize it in that autocast region, or give weights_once that dtype")
        if not torch.compiler.is_compiling() and self._identity_now() != self._identity:
            raise RuntimeError(change_message([self.name]))

    def _kind_now(self) -> tuple[Any, ...]:
        return self._w.shape, self._w.dtype, self._w.device

    def _identity_now(self) -> tuple[int, int]:
        return self._w._version, self._w.data_ptr()

    def _sample(self) -> Tensor:
        """Return elements of every expert at equal distances, as integers: bits are compared, NaN is a value."""
        experts = (self._w if self._w.is_contiguous() else self._w.mT).detach().flatten(1)
        count, size = experts.shape
        expected = max(-(-SAMPLES // count), SAMPLES_OF_EXPERT)
        distance = max(size // expected, 1) - 1 | 1  # odd: rows are multiples of 16, and one column would be all
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


class QuantizedWeights:
    """FP8 values of weights for the forward pass and for the input gradient. Made by :func:`quantize_weights`.

    As a context manager it checks at its end that the weights did not change, and cannot be used afterwards. A copy or
    a pickle holds no FP8 values: it quantizes the weights that were copied with it.
    """

    float8_dtype: torch.dtype
    """FP8 format of the values."""
    recipe: str
    """Recipe of ``fp8_grouped_mm`` that they were quantized for."""
    fingerprint: Fingerprint
    """Fingerprint of the weights at the time of quantization."""
    layout: str
    """``ENK``, or ``EKN`` where the weights lie as (E, K, N)."""

    def __init__(self, w: Tensor, float8_dtype: torch.dtype, recipe: str, layout: str, name: str) -> None:
        self.float8_dtype, self.recipe, self.layout, self._w = float8_dtype, recipe, layout, w
        with torch.inference_mode(False):  # autograd saves the values
            self._tensors = outputs_for(recipe, self._view().detach(), float8_dtype)
        self.fingerprint = Fingerprint(w, name)
        self.requantize()

    @property
    def weights(self) -> Tensor:
        """``B_t``, (E, K, N): a view of the weights, through which gradients reach them."""
        return self._view() if self.layout == "ENK" else self._w

    @property
    def codes(self) -> tuple[Tensor, ...]:
        """FP8 values (E, K, N) and scales (E, 1, N) as ``colwise-3d`` makes them, then those of ``transpose-3d``.

        For the folded recipe the third is the values of the first, transposed, and the last. Raises RuntimeError where
        the weights are known to have changed, or are cast to another dtype here.
        """
        if not self._tensors:
            raise RuntimeError(f"{self.fingerprint.name} is used after its with block ended: quantize it anew")
        self.fingerprint.check_use()
        # weights that lie as (E, K, N) are quantized by their transposed view
        return self._tensors if self.layout == "ENK" else (*self._tensors[2:], *self._tensors[:2])

    def check(self) -> None:
        """Raise RuntimeError if sampled elements of the weights differ from when they were quantized.

        Waits for the device.
        """
        if self.fingerprint.changed().item():
            raise RuntimeError(change_message([self.fingerprint.name]))

    @_disable_dynamo
    def requantize(self) -> None:
        """Quantize the weights as they are now into the same memory: a CUDA graph reads the new values."""
        w, (q, *_) = self._view().detach(), self._tensors
        if w.shape != q.shape or w.device != q.device:
            now = f"{self.fingerprint.name} is {tuple(w.shape)} on {w.device} now"
            raise RuntimeError(f"{now}, was {tuple(q.shape)} on {q.device}: quantize it anew")
        self.fingerprint.renew()
        with torch.no_grad(), torch.inference_mode(False):
            requantize_into(self.recipe, w.to(self.fingerprint.dtype), self._tensors)
            increment_version(self._tensors)  # a backward pass that saved the old values raises

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            self._tensors = ()

    def _view(self) -> Tensor:
        """Return what the kernel reads: of weights that lie as (E, X, Y) the view (E, Y, X)."""
        return self._w.transpose(1, 2) if self._w.is_contiguous() else self._w

    def __reduce__(self) -> tuple[Any, ...]:
        return (QuantizedWeights, (self._w, self.float8_dtype, self.recipe, self.layout, self.fingerprint.name))

    def __repr__(self) -> str:
        return f"QuantizedWeights({self.fingerprint.name}, {tuple(self._w.shape)}, {self.float8_dtype})"


def as_stored(w: Tensor) -> Tensor:
    """Return the parameter that ``w`` is or views transposed, else ``w``. Raises ValueError for no weights."""
    if type(w).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ValueError(f"w is a {type(w).__name__}, wanted a plain tensor: that of this rank, as to_local() gives it")
    is_stored = w.is_contiguous()
    if not is_stored and w.dim() == 3 and not w.mT.is_contiguous():
        _, rows, columns = w.shape
        expected = f"({rows * columns}, {columns}, 1), row-major (E, N, K), or its view weights.transpose(1, 2)"
        raise ValueError(f"w has strides {w.stride()}, wanted {expected}")
    check_weights("w", w, as_stored=is_stored)
    if w.is_inference():
        raise ValueError("w was made in inference mode, and has no version to tell its changes by: make it outside")
    _, rows, columns = w.shape if is_stored else w.mT.shape
    check_multiples("w", N=rows, K=columns)
    base = w._base
    reaches = base is not None and base.requires_grad == w.requires_grad  # else the view is a leaf of its own
    if not is_stored and base is not None and reaches and base.shape == w.mT.shape and base.is_contiguous():
        return base
    return w


def outputs_for(recipe: str, w: Tensor, float8_dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return uninitialized codes and scales of weights (E, K, N), as :func:`quantize_weights` makes them."""
    q, scales = colwise_3d.SPEC.outputs(w, float8_dtype, True)
    if recipe == "default":
        return q, scales, *transpose_3d_atomic.SPEC.outputs(w, float8_dtype, True)
    return q, scales, *transposed_codes_3d.SPEC.outputs(q)


def requantize_into(recipe: str, w: Tensor, codes: tuple[Tensor, ...]) -> None:
    """Quantize weights (E, K, N) into codes and scales that are there."""
    (_requantize_folded if recipe == "folded" else _requantize)(w, *codes)


def _run(w: Tensor, *outputs: Tensor) -> None:
    check_weights("w", w)
    colwise_3d.SPEC(w, outputs[0].dtype, True, outputs=outputs[:2])
    transpose_3d_atomic.SPEC(w, outputs[0].dtype, True, outputs=outputs[2:])


def _run_folded(w: Tensor, q: Tensor, scales: Tensor, transposed: Tensor) -> None:
    check_weights("w", w)
    colwise_3d.SPEC(w, q.dtype, True, outputs=(q, scales))
    transposed_codes_3d.SPEC(q, outputs=(transposed,))


_FOLDED = "Tensor w, Tensor(a!) q, Tensor(b!) scales, Tensor(c!) q_transposed"
_SCHEMA = f"requantize_weights({_FOLDED}, Tensor(d!) scales_transposed) -> ()"
_requantize: Callable[..., None] = define(_SCHEMA, _run, _run, lambda *_: None)
_requantize_folded: Callable[..., None] = define(
    f"requantize_folded_weights({_FOLDED}) -> ()", _run_folded, _run_folded, lambda *_: None
)
