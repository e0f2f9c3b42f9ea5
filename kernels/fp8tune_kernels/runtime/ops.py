"""Operators of ``torch.library``: what ``torch.compile(fullgraph=True)`` traces and CUDA graphs capture.

Each has one implementation for CUDA and HIP devices, one for the CPU, and a fake one for ``meta`` and traced tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .launching import replayed

P = ParamSpec("P")
R = TypeVar("R")
Function = Callable[..., Any]
Tensors = tuple[torch.Tensor, ...]

NAMESPACE = "fp8tune"
"""Namespace of all operators. A build under another name changes this line alone."""

OPERATORS: Any = getattr(torch.ops, NAMESPACE)

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(
    schema: str,
    gpu: Function | None,
    cpu: Function,
    fake: Function,
    *,
    makes_codes: bool = False,
    replays: bool = False,
) -> Any:
    """Define the operator of a schema and return the callable operator.

    ``gpu`` runs with the device of the first argument as the current one. ``makes_codes``: no output is differentiable,
    whatever the inputs are. ``replays``: ``gpu`` is recorded (:mod:`.launching`), and eager calls without a gradient go
    past the dispatcher.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cpu, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    if gpu is not None:
        on_gpu = on_its_device(replayed(gpu) if replays else gpu)
        _LIBRARY.impl(name, on_gpu, "CUDA")
    if makes_codes:
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")  # the default marks codes as differentiable
    operator = getattr(OPERATORS, name)
    return _past_the_dispatcher(operator, on_gpu) if replays else operator


def on_its_device(function: Function) -> Function:
    """Return a function that runs with the device of its first argument as the current one: Triton launches there."""

    def run(*arguments: Any) -> Any:
        index = arguments[0].device.index
        if index == torch.cuda.current_device():
            return function(*arguments)
        with torch.cuda.device(index):
            return function(*arguments)

    return run


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _past_the_dispatcher(operator: Function, on_gpu: Function) -> Function:
    """Return the operator, but for calls that nothing traces, differentiates or records: they take half as long."""

    def call(*arguments: Any, **options: Any) -> Any:
        if options or torch.compiler.is_compiling() or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
            return operator(*arguments, **options)
        first = arguments[0]
        return on_gpu(*arguments) if first.is_cuda and type(first) in _PLAIN else operator(*arguments)

    call.__name__ = operator.__name__
    return call


def is_traced(tensor: torch.Tensor) -> bool:
    """Return True for a tensor without values: an operator then makes its outputs and launches nothing."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


_TYPES = {
    **{name: name for name in ("Tensor", "bool", "int", "str")},
    **dict.fromkeys(("Tensor | None", "Maybe"), "Tensor?"),
    **dict.fromkeys(("list[Tensor | None]", "Given"), "Tensor?[]"),
    **dict.fromkeys(("list[Tensor]", "Sequence[Tensor]"), "Tensor[]"),
    **dict.fromkeys(("torch.dtype | None", "Dtype"), "ScalarType?"),
    **{"Sequence[bool]": "bool[]", "Sequence[str]": "str[]", "tuple[Tensor, Tensor]": "(Tensor, Tensor)"},
}
"""Annotation of a step -> type in its schema."""


def step(name: str, function: Callable[P, R]) -> Callable[P, R]:
    """Define an operator that launches several kernels by calling their specifications, and replays.

    One function serves all devices and traced tensors. Outputs are not differentiable. The schema is that of its
    annotations; a parameter with a default has no part in it.
    """
    signature = inspect.signature(function)
    required = [item for item in signature.parameters.values() if item.default is item.empty]
    parameters = ", ".join(f"{_TYPES[item.annotation]} {item.name.rstrip('_')}" for item in required)

    def on_cpu(*arguments: Any) -> Any:
        with torch.no_grad():  # autograd would follow the references, and fails at their views
            return any_function(*arguments)

    any_function: Function = function
    schema = f"{name}({parameters}) -> {_TYPES[signature.return_annotation]}"
    return define(schema, function, on_cpu, function, makes_codes=True, replays=True)  # type: ignore[no-any-return]


def differentiable_once(name: str) -> Callable[[Function], Function]:
    """Decorate the ``backward`` of an autograd function: a second derivative of ``name`` raises RuntimeError.

    As ``torch.autograd.function.once_differentiable``, but with the name. Without it autograd goes through the rounding
    to FP8, and either fails somewhere inside or gives a wrong result.
    """
    message = f"{name} has no second derivative: differentiate it once, without create_graph=True"

    def decorate(backward: Function) -> Function:
        @functools.wraps(backward)
        def once(ctx: Any, *gradients: torch.Tensor) -> Any:
            # a compiler traces with gradients enabled, and has its own refusal
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return backward(ctx, *gradients)
            with torch.no_grad():
                answer = backward(ctx, *gradients)
            refuse: Any = torch._C._functions.DelayedError(message.encode(), len(answer))
            return refuse(*(None if gradient is None else gradient.requires_grad_() for gradient in answer))

        return once

    return decorate
