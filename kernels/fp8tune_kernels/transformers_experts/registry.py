"""Registration of our experts with transformers, and the modules of a model that they multiply."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .forward import Options, experts_forward, gate_of
from .once import Block, layer_weights_of, weights_of

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.trainer_callback import TrainerCallback
except ImportError as error:
    raise ImportError("no transformers with experts implementations: pip install 'fp8tune[transformers]'") from error


def register(name: str, options: Options) -> None:
    """Make ``options`` an implementation that ``model.set_experts_implementation(name)`` takes."""
    ALL_EXPERTS_FUNCTIONS.register(name, functools.partial(experts_forward, options=options))


def use_fp8_experts(model: Any, implementation: str = "fp8tune") -> list[str]:
    """Set the experts implementation of a transformers model; return the names of the modules that multiply in FP8.

    Warns where none does: transformers accepts an implementation for models without its experts interface, such as
    Llama 4, and changes nothing. Raises what ``set_experts_implementation`` raises.
    """
    model.set_experts_implementation(implementation)
    names = fp8_modules(model)
    if not names:
        warnings.warn(
            f"no module of {type(model).__name__} has experts that {implementation!r} multiplies: nothing changed",
            stacklevel=2,
        )
    return names


def fp8_modules(model: nn.Module) -> list[str]:
    """Return the names of a model's modules whose experts implementation is one of ours."""
    return list(_experts(model))


@contextlib.contextmanager
def weights_once(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Quantize expert weights once for all calls of a model inside this block, and check that they do not change.

    ``model``: a model of transformers whose experts implementation is one of ours, or a module around it.
    ``dtype``: quantize all weights at entry, from this dtype, which is that of autocast where the model is called.
    None quantizes each weight at its first use; for a model that ``torch.compile`` returned, at entry, in the autocast
    region of the entry.

    The FP8 values live until the block ends, 2 bytes for each weight. At the end sampled elements of every weight are
    compared with those that were quantized. An exception inside the block passes through, without that check.

    Warns if no module multiplies in FP8. Raises RuntimeError at entry inside another block of the same model, under
    FSDP and under ZeRO stage 3; at the end, and at a use where it is known, if a weight has changed.
    """
    experts = _experts(model)
    if not experts:
        warnings.warn(
            f"no module of {type(model).__name__} multiplies in FP8: weights_once has no effect", stacklevel=3
        )  # a frame is contextlib's
    block = Block({path: module for path, (module, _) in experts.items()})
    try:
        if dtype is not None or _is_compiled(model):
            _quantize_all(experts, dtype)
        yield
        block.check()
    finally:
        block.free()


def _quantize_all(experts: dict[str, tuple[Any, Options]], dtype: torch.dtype | None) -> None:
    for module, options in experts.values():
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            w = getattr(module, name)
            is_cast = dtype not in (None, w.dtype)
            with torch.autocast(w.device.type, dtype) if is_cast else contextlib.nullcontext():
                if options.is_layer and gate_of(module):
                    layer_weights_of(module, name)
                else:
                    weights_of(module, name, options.recipe)


def _is_compiled(model: nn.Module) -> bool:
    return any(
        isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
        for module in model.modules()
    )


def _experts(model: nn.Module) -> dict[str, tuple[Any, Options]]:
    """Return the modules of experts that ours multiply, by path."""
    experts = {}
    module: Any
    for path, module in model.named_modules():
        if not hasattr(module, "is_transposed") or not hasattr(module, "config"):
            continue
        forward = ALL_EXPERTS_FUNCTIONS.get(module.config._experts_implementation, None)
        options = forward.keywords.get("options") if isinstance(forward, functools.partial) else None
        if isinstance(options, Options):
            experts[path] = module, options
    return experts


@contextlib.contextmanager
def weights_once_per_step(trainer: Any) -> Iterator[None]:
    """Train with :func:`weights_once` around the micro-batches of every step: ``trainer.train()`` goes inside.

    A context manager, as Trainer calls no callback when training raises. Raises RuntimeError under DeepSpeed, where
    Trainer steps the optimizer inside the last backward pass.
    """
    if trainer.is_deepspeed_enabled:
        raise RuntimeError("Trainer with DeepSpeed steps the optimizer inside backward: train without weights_once")
    with contextlib.ExitStack() as block:
        callback = _WeightsOnce(trainer, block)
        trainer.add_callback(callback)
        try:
            yield
        finally:
            trainer.remove_callback(callback)


class _WeightsOnce(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: Any, block: contextlib.ExitStack) -> None:
        self._trainer, self._block = trainer, block

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Begin the block of a step."""
        self._block.close()  # an epoch may stop between the micro-batches of a step
        with self._trainer.accelerator.autocast():
            self._block.enter_context(weights_once(self._trainer.model_wrapped))

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """End it: gradients are complete and clipped."""
        self._block.close()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End it where training stopped between micro-batches."""
        self._block.close()
