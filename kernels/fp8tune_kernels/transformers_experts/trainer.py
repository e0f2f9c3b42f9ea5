"""Expert weights quantized once a step under transformers' Trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers.trainer_callback import TrainerCallback

from .registry import weights_once

__all__ = ["weights_once_per_step"]


@contextlib.contextmanager
def weights_once_per_step(trainer: Any) -> Iterator[None]:
    """Train with :func:`.weights_once` around the micro-batches of every step: ``trainer.train()`` goes inside.

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
