"""The place of our experts among those of transformers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from fp8tune_kernels.transformers_experts.forward import Options, experts_forward
from fp8tune_kernels.transformers_experts.held import fresh_weights

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise ImportError("no transformers with experts implementations: pip install 'fp8tune[transformers]'") from error

__all__ = ["hold_weights", "register"]


def register(name: str, options: Options) -> None:
    """Make ``options`` an implementation that ``model.set_experts_implementation(name)`` takes."""
    ALL_EXPERTS_FUNCTIONS.register(name, functools.partial(experts_forward, options=options))


def hold_weights(model: nn.Module) -> int:
    """Quantize now the weights of all experts whose implementation has weights once; how many there are.

    For ``torch.compile``, beforehand, in the autocast region that the model runs in. In eager mode each use does it.
    """
    found = 0
    for module, options in _modules(model):
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            fresh_weights(module, name, "folded" if options.is_one_operation else options.recipe)
            found += 1
    return found


def _modules(model: nn.Module) -> Iterator[tuple[Any, Options]]:
    module: Any
    for module in model.modules():
        if not hasattr(module, "is_transposed") or not hasattr(module, "config"):
            continue
        forward = ALL_EXPERTS_FUNCTIONS.get(module.config._experts_implementation, None)
        options = forward.keywords.get("options") if isinstance(forward, functools.partial) else None
        if isinstance(options, Options) and options.weights_once:
            yield module, options
