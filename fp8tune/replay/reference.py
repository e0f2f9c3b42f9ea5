"""Outputs of a recorded kernel from a function that the user names with ``--reference``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fp8tune.errors import UsageError, one_line
from fp8tune.replay.case import Case, Storage, torch_dtype


class _UnusableError(ValueError):
    """A fault of what a reference returns; the text names it."""


def expected_outputs(function: Callable[..., Any], is_close: bool, *inputs: Any) -> tuple[Any, ...]:
    """Return what a function of the kernel's arguments returns: a tensor, a tuple, or a dict by name.

    ``is_close``: in float64, for a check within a bound. Raises UsageError for whatever is wrong with the function:
    that is no fault of any config.
    """
    case: Case = inputs[-1]
    outputs = case.outputs()
    case.prepare(inputs, outputs)
    try:
        parameters = inspect.signature(function).parameters.values()
        takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters)
        names = {item.name for item in parameters}
        results: dict[str, Mapping[str, Any]] = {}
        for launch, arguments in zip(case.launches, case.arguments(inputs, outputs), strict=True):
            own = {item.name for storage in case.written if storage.launch is launch for item in storage.arguments}
            written = [item.name for item in launch.tensors if item.name in own and item.is_stored is not False]
            taken = {name: value for name, value in arguments.items() if takes_all or name in names}
            result = function(**{name: _widened(value) if is_close else value for name, value in taken.items()})
            results[launch.id] = _by_name(result, written)
        pairs = zip(case.written, outputs, strict=True)
        return tuple(_expected(storage, output, results[storage.launch.id], is_close) for storage, output in pairs)
    except (Exception, SystemExit) as error:
        where = f"{function.__module__}:{getattr(function, '__name__', function)}"
        reason = str(error) if isinstance(error, _UnusableError) else f"it raised {one_line(error)}"
        raise UsageError(f"--reference {where} cannot be used: {reason}") from error


def _widened(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_widened, value))
    return value.double() if getattr(getattr(value, "dtype", None), "is_floating_point", False) else value


def _by_name(result: Any, written: Sequence[str]) -> Mapping[str, Any]:
    """Return a reference's tensors by the argument that should hold each."""
    names = ", ".join(written)
    if not isinstance(result, Mapping):
        tensors = result if isinstance(result, tuple | list) else (result,)
        if len(tensors) != len(written):
            raise _UnusableError(f"it gives {len(tensors)} tensors, the kernel writes {names}: give a dict")
        result = dict(zip(written, tensors, strict=True))
    for name, tensor in result.items():
        if name not in written:
            raise _UnusableError(f"it gives {name!r}, the kernel writes {names}")
        if not hasattr(tensor, "untyped_storage"):
            raise _UnusableError(f"it gives {type(tensor).__name__} for {name}: return a tensor")
    return dict(result)


def _expected(storage: Storage, output: Any, results: Mapping[str, Any], is_close: bool) -> Any:
    """Return an output as the reference has it; what it does not name is what the launch finds there."""
    is_wide = is_close and output.dtype.is_floating_point
    expected = output.double() if is_wide else output
    for argument in (argument for argument in storage.arguments if argument.name in results):
        result, name, dtype = results[argument.name], argument.name, torch_dtype(argument.dtype)
        if tuple(result.shape) != argument.shape:
            raise _UnusableError(f"its {name} has the shape {tuple(result.shape)}, the kernel's {argument.shape}")
        if not is_close and result.dtype != dtype:
            reason = f"{result.dtype}, the kernel's {dtype}"
            raise _UnusableError(f"its {name} is {reason}: return that, or add --tolerance RTOL,ATOL")
        if not is_wide:
            storage.view(expected, argument).copy_(result)
        elif storage.is_flat:
            start = expected.storage_offset() + argument.offset
            expected.as_strided(argument.shape, argument.strides, start).copy_(result)
        else:
            expected.copy_(result)
    return expected
