"""Weights that are quantized once and multiplied by several micro-batches, until they change.

    for batch in batches:
        experts = quantize_weights(w)           # once a step of the optimizer
        for tokens in batch.split(...):         # fp8_grouped_mm takes it in place of w.transpose(1, 2)
            fp8_grouped_mm(A, experts, offs)...backward()
        optimizer.step()

One read makes the codes of both passes: those of ``colwise-3d`` and those of ``transpose-3d``. They take 2 bytes an
element. us on an H200 of the one kernel, and of the two: 97, 96 at one expert of 8192 x 5120, 1,165, 1,170 at 16,
289, 331 at 64 of 1408 x 2048, 213, 219 at 8 of 2048 x 7168.

Codes are never older than the weights they stand for. Each use compares where the weights lie and how often torch has
counted a change of them (``Tensor._version``). A step of an optimizer is told by a hook: the fused ones of torch change
their parameters uncounted. What neither sees: a write through ``w.data``, and the replay of a CUDA graph.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # as torch.compiler.disable, which takes a second to import
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fp8tune_kernels import interpreter
from fp8tune_kernels.catalog import RECIPES
from fp8tune_kernels.gemm.operands import check_multiples
from fp8tune_kernels.quantize import colwise_3d, colwise_transpose_3d, transposed_codes_3d
from fp8tune_kernels.quantize import weights as expert_weights
from fp8tune_kernels.runtime.checks import check_weights, fp8_dtype_for
from fp8tune_kernels.runtime.lookup import config_for
from fp8tune_kernels.runtime.ops import define
from fp8tune_kernels.spec import KernelSpec

__all__ = ["QuantizedWeights", "quantize_weights"]

Codes = tuple[Tensor, Tensor]
"""Codes and scales."""

AGAIN = "call quantize_weights again after each step of the optimizer, or requantize()"


@_disable_dynamo  # versions and addresses are read here
def quantize_weights(
    w: Tensor, *, float8_dtype: torch.dtype | None = None, recipe: str = "default", layout: str = "ENK"
) -> QuantizedWeights:
    """Quantize expert weights for ``fp8_grouped_mm``, which takes the result in place of ``B_t`` until ``w`` changes.

    ``w``: the parameter, (E, N, K), row-major, or its view (E, K, N), strides (K*N, 1, K); bfloat16, float16 or
    float32. Gradients reach it. Under autocast it is cast first, as ``fp8_grouped_mm`` would.
    ``layout``: ``"EKN"`` for a row-major parameter (E, K, N), which is ``B_t`` itself, as gpt-oss keeps it.
    ``float8_dtype`` None is the format of the running arch. ``recipe``: the one of ``fp8_grouped_mm`` that multiplies.

    Raises ValueError, naming the argument: a wrong dtype, rank or stride; another recipe; N or K that is no multiple of
    16; a tensor made in inference mode, which has no version; a subclass such as DTensor. Not inside ``torch.compile``:
    give the result to what is compiled.
    """
    if float8_dtype not in (None, torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        raise ValueError(f"float8_dtype is {float8_dtype}, wanted None, torch.float8_e4m3fn or torch.float8_e4m3fnuz")
    if recipe not in RECIPES:
        raise ValueError(f"recipe is {recipe!r}, wanted {' or '.join(map(repr, RECIPES))}")
    if layout not in ("ENK", "EKN"):
        raise ValueError(f"layout is {layout!r}, wanted 'ENK' or 'EKN'")
    if layout == "EKN" and recipe == "folded":
        raise ValueError("recipe is 'folded', wanted 'default' for layout 'EKN': no kernel folds their scales")
    if layout == "EKN" and w.dim() == 3 and not w.is_contiguous():
        raise ValueError(f"w has strides {w.stride()}, wanted row-major for layout 'EKN'")
    w = _as_stored(w)
    return QuantizedWeights(w, fp8_dtype_for(w.device, float8_dtype), recipe, layout)


class QuantizedWeights:
    """FP8 codes of weights for the forward pass and for the input gradient. Made by :func:`quantize_weights`.

    A copy, or what was pickled, quantizes the weights that were copied with it.
    """

    float8_dtype: torch.dtype
    """Of the codes."""
    recipe: str
    """Of ``fp8_grouped_mm``, that they were quantized for."""
    dtype: torch.dtype
    """What they were quantized from: that of the weights, or of the autocast region."""
    version: int
    """``w._version`` when they were quantized."""
    nbytes: int
    """Of all codes and scales: about 2 an element."""

    layout: str
    """``ENK``, or ``EKN`` where the weights lie as (E, K, N)."""

    def __init__(self, w: Tensor, float8_dtype: torch.dtype, recipe: str = "default", layout: str = "ENK") -> None:
        self.float8_dtype, self.recipe, self.layout, self._w = float8_dtype, recipe, layout, w
        with torch.inference_mode(False):  # autograd saves the codes
            tensors = outputs_for(recipe, self._view().detach(), float8_dtype)
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self._tensors = tensors
        self._forward: Codes = tensors[0], tensors[1]
        self._transposed: Codes = tensors[2], tensors[1 if recipe == "folded" else 3]
        if layout == "EKN":  # see row_major
            self._forward, self._transposed = self._transposed, self._forward
        for tensor in tensors:  # else mode="reduce-overhead" copies them at each call, and reads versions of the copies
            torch._dynamo.mark_static_address(tensor)
        _watch_optimizers()
        self.requantize()
        for codes, _ in (self._forward, self._transposed):
            _made[codes.data_ptr()] = self

    @property
    def weights(self) -> Tensor:
        """``B_t``, (E, K, N): a view of the weights, through which gradients reach them."""
        return self._view() if self.layout == "ENK" else self._w

    @property
    def forward(self) -> Codes:
        """Codes (E, K, N) and scales (E, 1, N), as ``colwise-3d`` makes them. Checked."""
        return self._checked(*self._forward)

    @property
    def transposed(self) -> Codes:
        """Codes (E, N, K) and scales (E, 1, K), as ``transpose-3d`` makes them. Checked.

        Of the folded recipe, the forward pass's, transposed, and its scales (E, 1, N).
        """
        return self._checked(*self._transposed)

    @property
    def codes(self) -> tuple[Tensor, ...]:
        """Codes and scales of both passes, by one check; of the folded recipe the scales once."""
        both = (*self.forward, *self._transposed)
        return both[:3] if self.recipe == "folded" else both

    @property
    def is_current(self) -> bool:
        """Whether :meth:`check` passes: ``fp8_grouped_mm`` would take them here. Not in ``torch.compile``."""
        return _cast_dtype(self._w) == self.dtype and self._change() is None

    @property
    def is_stepped(self) -> bool:
        """Whether an optimizer has changed the weights since."""
        return self._is_stepped

    def is_of(self, w: Tensor) -> bool:
        """Whether they stand for this parameter, and have its shape and device: :meth:`requantize` would do."""
        read, codes = self._view(), self._tensors[0]
        return w is self._w and read.shape == codes.shape and read.device == codes.device

    def check(self) -> None:
        """Raise RuntimeError if the weights have changed, or are cast to another dtype here than was quantized.

        In ``torch.compile`` an operator checks when the compiled function runs. In a CUDA graph this ran at capture.
        """
        if (dtype := _cast_dtype(self._w)) != self.dtype:
            made = f"B_t was quantized from {self.dtype} and would be cast to {dtype} here"
            raise RuntimeError(f"{made}: call quantize_weights in the same autocast region")
        if not torch.compiler.is_compiling():
            self._check_weights()

    @_disable_dynamo
    def requantize(self) -> None:
        """Quantize the weights as they are now into the same memory: a CUDA graph reads the new codes."""
        codes = self._tensors
        w = self._view().detach()
        if w.shape != codes[0].shape or w.device != codes[0].device:
            had = f"{tuple(w.shape)} on {w.device}, and its codes {tuple(codes[0].shape)} on {codes[0].device}"
            raise RuntimeError(f"B_t is now {had}: call quantize_weights")
        self.dtype = _cast_dtype(w)
        self.version, self._address, self._is_stepped = self._w._version, _address(self._w), False
        self._storage = self._w.untyped_storage()  # held, so that no other weights come to lie there
        with torch.no_grad(), torch.inference_mode(False):
            _requantize[self.recipe](w.to(self.dtype), *codes)
            increment_version(codes)  # a backward pass that saved the old codes raises

    def _view(self) -> Tensor:
        """What the kernel reads: of weights that lie as (E, X, Y) the view (E, Y, X)."""
        return self._w.transpose(1, 2) if self._w.is_contiguous() else self._w

    def _checked(self, codes: Tensor, scales: Tensor) -> Codes:
        self.check()
        if torch.compiler.is_compiling():
            scales = _checked_scales(self._w, codes, scales)
        return codes, scales

    def _check_weights(self) -> None:
        if change := self._change():
            raise RuntimeError(f"B_t was quantized before {change}: {AGAIN}")

    def _change(self) -> str | None:
        """What has happened to the weights since."""
        if self._is_stepped:
            return "a step of the optimizer changed its weights"
        if self._w._version != self.version:
            return "its weights changed in place"
        if _address(self._w) != self._address:
            return "its weights moved to other memory"
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (QuantizedWeights, (self._w, self.float8_dtype, self.recipe, self.layout))

    def __repr__(self) -> str:
        return f"QuantizedWeights({tuple(self._forward[0].shape)}, {self.float8_dtype}, version={self.version})"


_made: weakref.WeakValueDictionary[int, QuantizedWeights] = weakref.WeakValueDictionary()
"""Where codes begin -> whose they are: what a compiled function is given are tensors alone."""


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    """Mark the codes of the weights that an optimizer has just changed; what it holds frozen it leaves."""
    if not _made:
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    for quantized in list(_made.values()):
        quantized._is_stepped |= id(quantized._w) in stepped or id(quantized._w._base) in stepped


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(torch.compiler.disable(_after_step))


def _as_stored(w: Tensor) -> Tensor:
    """The parameter that ``w`` is, or is the transposed view of; else ``w``. Raises ValueError for no weights."""
    if type(w).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ValueError(f"w is a {type(w).__name__}, wanted a plain tensor: that of this rank, as to_local() gives it")
    as_stored = w.is_contiguous()
    if not as_stored and w.dim() == 3 and not w.mT.is_contiguous():
        _, rows, columns = w.shape
        wanted = f"({rows * columns}, {columns}, 1), row-major (E, N, K), or its view weights.transpose(1, 2)"
        raise ValueError(f"w has strides {w.stride()}, wanted {wanted}")
    check_weights("w", w, as_stored=as_stored)
    if w.is_inference():
        raise ValueError("w was made in inference mode, and has no version to tell its changes by: make it outside")
    _, rows, columns = w.shape if as_stored else w.mT.shape
    check_multiples("w", N=rows, K=columns)
    base = w._base
    reaches = base is not None and base.requires_grad == w.requires_grad  # else the view is a leaf of its own
    if not as_stored and base is not None and reaches and base.shape == w.mT.shape and base.is_contiguous():
        return base
    return w


def _cast_dtype(w: Tensor) -> torch.dtype:
    """What ``fp8_grouped_mm`` would quantize here: the autocast region's dtype, or that of ``w``."""
    if not w.is_meta and torch.is_autocast_enabled(w.device.type):
        return torch.get_autocast_dtype(w.device.type)
    return w.dtype


def _address(w: Tensor) -> tuple[int, int]:
    """Where weights lie, and what they are a view of: ``w.data = other`` moves the one and not the other."""
    base = w._base
    return w.data_ptr(), 0 if base is None else base.data_ptr()


def outputs_for(recipe: str, w: Tensor, float8_dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Uninitialised codes and scales of weights (E, K, N), as :func:`quantize_weights` makes them."""
    if recipe == "default":
        return colwise_transpose_3d.outputs(w, float8_dtype, True)
    q, scales = colwise_3d.outputs(w, float8_dtype, True)
    return q, scales, *transposed_codes_3d.outputs(q)


def _quantize(w: Tensor, *outputs: Tensor) -> None:
    _run(colwise_transpose_3d.SPEC, expert_weights.arguments(w, outputs[0].dtype, True), outputs)


def _quantize_folded(w: Tensor, q: Tensor, scales: Tensor, transposed: Tensor) -> None:
    _run(colwise_3d.SPEC, expert_weights.arguments(w, q.dtype, True), (q, scales))
    _run(transposed_codes_3d.SPEC, (q,), (transposed,))


def _run(spec: KernelSpec, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """A kernel into memory that is there."""
    w = inputs[0]
    if not w.is_cpu or interpreter.INTERPRETED:
        E, K, N = w.shape
        spec.launch(config_for(spec, (E, K, N), w.device), inputs, outputs)
        return
    for output, made in zip(outputs, spec.reference(*inputs), strict=True):
        output.copy_(made)


def _check_codes(w: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """A copy of ``scales``: the GEMM waits for it, so no compiler drops the check."""
    quantized = _made.get(codes.data_ptr())
    if quantized is None:
        raise RuntimeError(
            "B_t has codes that torch.compile has copied: mark them by torch._dynamo.mark_static_address"
        )
    if w.data_ptr() != quantized._w.data_ptr():
        raise RuntimeError(f"B_t was quantized before its weights changed in the compiled function: {AGAIN}")
    quantized._check_weights()
    return scales.clone()


_requantize: dict[str, Callable[..., None]] = {
    "default": define(
        "requantize_weights(Tensor w, Tensor(a!) q, Tensor(b!) scales, Tensor(c!) q_transposed, "
        "Tensor(d!) scales_transposed) -> ()",
        _quantize,
        _quantize,
        lambda *_: None,
    ),
    "folded": define(
        "requantize_folded_weights(Tensor w, Tensor(a!) q, Tensor(b!) scales, Tensor(c!) q_transposed) -> ()",
        _quantize_folded,
        _quantize_folded,
        lambda *_: None,
    ),
}
_checked_scales: Callable[..., Tensor] = define(
    "checked_scales(Tensor w, Tensor codes, Tensor scales) -> Tensor",
    _check_codes,
    _check_codes,
    lambda w, codes, scales: torch.empty_like(scales),
    makes_codes=True,
)
