"""The place of our experts among those of transformers."""

from __future__ import annotations

import functools

from fp8tune_kernels.transformers_experts.forward import Options, experts_forward

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise ImportError("no transformers with experts implementations: pip install 'fp8tune[transformers]'") from error

__all__ = ["register"]


def register(name: str, options: Options) -> None:
    """Make ``options`` an implementation that ``model.set_experts_implementation(name)`` takes."""
    ALL_EXPERTS_FUNCTIONS.register(name, functools.partial(experts_forward, options=options))
