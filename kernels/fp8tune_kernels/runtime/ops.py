"""Operators of ``torch.library``: what ``torch.compile(fullgraph=True)`` traces and CUDA graphs capture.

Each has one implementation for CUDA and HIP devices, one for the CPU, and a fake one for ``meta`` and traced tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .. import interpreter
from ..spec import KernelSpec
from .checks import check_ends
from .lookup import config_for
from .replay import replayed

__all__ = ["NAMESPACE", "OPERATORS", "Inputs", "Tensors", "define", "is_traced", "on_its_device", "register", "run", "step"]

Function = Callable[..., Any]
R = TypeVar("R")
Inputs = tuple[Any, ...]
Tensors = tuple[torch.Tensor, ...]

NAMESPACE = "fp8tune"
"""Namespace of all operators. A build under another name changes this line alone."""

OPERATORS: Any = getattr(torch.ops, NAMESPACE)

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

_TYPES = {
    "torch.Tensor": "Tensor",
    "torch.Tensor | None": "Tensor?",
    "torch.dtype | None": "ScalarType?",
    "bool": "bool",
    "int": "int",
    "str": "str",
}
"""An annotation of a wrapper -> the type in the operator's schema."""


def define(
    schema: str,
    gpu: Function | None,
    cpu: Function,
    fake: Function,
    *,
    gradient: tuple[Function, Function] | None = None,
    makes_codes: bool = False,
    replays: bool = False,
) -> Any:
    """Define the operator of a schema and return the callable operator.

    ``gpu`` runs with the device of the first argument as the current one. ``gradient``: the backward function and the
    one that saves what it needs. ``makes_codes``: no output is differentiable, whatever the inputs are. ``replays``:
    ``gpu`` is recorded (:mod:`.replay`), and eager calls without a gradient go past the dispatcher.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cpu, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    if gpu is not None:
        on_gpu = on_its_device(replayed(gpu) if replays else gpu)
        _LIBRARY.impl(name, on_gpu, "CUDA")
    if gradient is not None:
        torch.library.register_autograd(f"{NAMESPACE}::{name}", gradient[0], setup_context=gradient[1], lib=_LIBRARY)
    if makes_codes:
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")  # the default marks codes as differentiable
    operator = getattr(OPERATORS, name).default
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
    """Return the operator, but for calls that nothing traces, differentiates or looks at: they take half as long."""

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
            return operator(*arguments)
        first = arguments[0]
        return on_gpu(*arguments) if first.is_cuda and type(first) in _PLAIN else operator(*arguments)

    call.operator = operator  # type: ignore[attr-defined]
    return call


KEYS: dict[str, Callable[..., tuple[int, ...]]] = {}
"""Kernel -> the function of its inputs that gives the values of its lookup key."""


def is_traced(tensor: torch.Tensor) -> bool:
    """Return True for a tensor without values: an operator then makes its outputs and launches nothing."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def run(spec: KernelSpec, inputs: Inputs, outputs: Tensors | None = None) -> Tensors:
    """The outputs of a kernel on the current device, on inputs that were checked, without a dispatcher.

    On a CPU where Triton does not interpret they are the reference's, of traced tensors they are empty. For operators
    that launch several kernels. ``outputs``: where to write them, in place of new tensors.
    """
    first = inputs[0]
    if is_traced(first):
        return spec.outputs(*inputs) if outputs is None else outputs
    if spec.name not in KEYS:
        return spec(*inputs, outputs=outputs)  # type: ignore[operator]
    if first.is_cpu and not interpreter.INTERPRETED:
        right = spec.reference(*inputs)
        return right if outputs is None else tuple(map(torch.Tensor.copy_, outputs, right))
    outputs = spec.outputs(*inputs) if outputs is None else outputs
    spec.launch(config_for(spec, KEYS[spec.name](*inputs), first.device), inputs, outputs)
    return outputs


def step(schema: str, function: Function, *, replays: bool = False) -> Any:
    """Define an operator that launches several kernels by :func:`run`; see :func:`define`.

    One function serves all devices and traced tensors. Outputs are not differentiable.
    """

    def on_cpu(*arguments: Any) -> Any:
        with torch.no_grad():  # autograd would follow the references, and fails at their views
            return function(*arguments)

    return define(schema, function, on_cpu, function, makes_codes=True, replays=replays)


def register(
    spec: KernelSpec,
    wrapper: Callable[..., R],
    prepare: Callable[..., Inputs],
    key: Callable[..., tuple[int, ...]],
    *,
    group_dim: int = 0,
    rows_of: Callable[[Inputs], int] | None = None,
    replays: bool = False,
) -> Callable[..., R]:
    """Define the operator of a kernel, of its public wrapper's name and parameters, and return it.

    On the CPU it runs the Triton kernel where Triton interprets, else the reference, and checks the values in ``offs``.

    ``prepare``: the operator's arguments -> the spec's inputs; raises ValueError for arguments the kernel cannot take.
    ``key``: the spec's inputs -> the values of ``spec.key``, from sizes alone.
    ``group_dim``: of a routed kernel, the dim of its first input that ``offs`` cuts into groups.
    ``rows_of``: the spec's inputs -> how many rows ``offs`` cuts, where the first input does not have them.
    ``replays``: see :func:`define`.
    """
    outputs_for, launch_kernel = spec.outputs, spec.launch
    KEYS[spec.name] = key
    annotations = dict(wrapper.__annotations__)
    returned = ["Tensor"] * annotations.pop("return").count("torch.Tensor")

    def given(outputs: Tensors) -> Tensors | torch.Tensor:
        return outputs if len(returned) > 1 else outputs[0]

    def launch(*arguments: Any) -> Tensors | torch.Tensor:
        inputs = prepare(*arguments)
        outputs = outputs_for(*inputs)
        launch_kernel(config_for(spec, key(*inputs), arguments[0].device), inputs, outputs)
        return given(outputs)

    def on_cpu(*arguments: Any) -> Tensors | torch.Tensor:
        inputs = prepare(*arguments)
        if spec.routed:
            offs = next(each for each in inputs if isinstance(each, torch.Tensor) and each.dtype == torch.int32)
            check_ends(offs, inputs[0].shape[group_dim] if rows_of is None else rows_of(inputs))
        with torch.no_grad():  # autograd would follow the reference, and stumbles over its views
            return launch(*arguments) if interpreter.INTERPRETED else given(spec.reference(*inputs))

    def fake(*arguments: Any) -> Tensors | torch.Tensor:
        return given(outputs_for(*prepare(*arguments)))

    # the schema: quantize_x(Tensor x, bool power_of_two, int alignment=1) -> (Tensor, Tensor); all by position, and a
    # default for numbers alone, which came later than the operators, and for what follows them
    defaults: dict[str, str] = {}
    for name, each in inspect.signature(wrapper).parameters.items():
        if each.default is not inspect.Parameter.empty and (annotations[name] == "int" or defaults):
            defaults[name] = f"={each.default}"
    parameters = [f"{_TYPES[annotation]} {name}{defaults.get(name, '')}" for name, annotation in annotations.items()]
    returns = returned[0] if len(returned) == 1 else f"({', '.join(returned)})"
    schema = f"{wrapper.__name__}({', '.join(parameters)}) -> {returns}"
    operator: Callable[..., R] = define(schema, launch, on_cpu, fake, makes_codes=True, replays=replays)
    return operator
