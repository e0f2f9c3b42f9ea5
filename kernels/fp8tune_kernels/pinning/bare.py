"""Launches of kernels without an autotuner: what of a config they take, and what they keep of their callers'.

Options of a config change no result, so that any launch takes them. Constants may: a block that has to cover a row, or
that decided the grid. They are replaced only in a launch that equals one of those that the config was checked on, in
its numbers, shapes, constants and programs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..tuners import decoded, flattened, function_name, is_tensor, python_function, tensor_in

_PLAIN = frozenset({int, bool, str, type(None)})
_TENSORS: set[type] = set()  # types of tensors that were launched with

Values = dict[str, Any]


class Choice(NamedTuple):
    """Part of a table's row that a launch takes."""

    options: Values
    config: Values | None = None
    """Options and constants; None if it keeps its own constants."""
    programs: tuple[int, ...] = ()
    """Programs of the launch that the constants were checked on."""

    def suits(self, arguments: Mapping[str, Any]) -> bool:
        """Return True if a launch has as many programs as the checked one."""
        assert self.config is not None
        grid, bound = arguments["grid"], {**arguments, **self.config}
        programs = grid(bound) if callable(grid) else grid
        return programs == self.programs or _padded(programs) == _padded(self.programs)


class Signature:
    """Parameters of a kernel without an autotuner."""

    def __init__(self, kernel: Any) -> None:
        function = python_function(kernel)
        self.names: tuple[str, ...] = tuple(kernel.arg_names)
        parameters = inspect.signature(function).parameters.values()
        self.defaults = {item.name: item.default for item in parameters if item.default is not item.empty}
        annotations = getattr(function, "__annotations__", {}).items()
        self.constants = frozenset(name for name, kind in annotations if "constexpr" in str(kind))

    def id_of(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what tells launches apart. Called at each launch: written for speed.

        Numbers that are not whole count only as constants: a learning rate is another at each launch.
        """
        items: list[Any] = []
        add, get = items.append, arguments.get
        for name in self.names:
            value: Any = get(name)
            kind = type(value)
            if kind in _PLAIN:
                add(value)
            elif kind in _TENSORS:
                add(value.dtype)
                add(value.shape)
            elif is_tensor(value):
                _TENSORS.add(kind)
                return self.id_of(arguments)
            elif kind is not float or name in self.constants:
                add(tuple(self._described(name, value).items()))
        return tuple(items)

    def described(self, arguments: Mapping[str, Any]) -> Values:
        """Return the arguments of a launch as an export writes them."""
        result: Values = {}
        for name in self.names:
            if name in arguments and (type(arguments[name]) is not float or name in self.constants):
                result |= self._described(name, arguments[name])
        return result

    def _described(self, name: str, value: Any) -> Values:
        try:
            return {name: _description(item) for name, item in flattened(name, value)}
        except TypeError:
            return {name: type(value).__name__}


def _description(value: Any) -> Any:
    tensor = tensor_in(value)
    if tensor is not None:
        return str(tensor.dtype), tuple(map(int, value.shape))
    kind = type(value)
    if kind in _PLAIN or kind is float:
        return value
    if kind is tuple:
        return tuple(map(_description, value))
    if kind.__name__ == "constexpr":
        return _description(value.value)
    if kind.__name__ == "dtype" and kind.__module__.startswith("triton"):
        names = vars(sys.modules["triton.language"])
        return next(f"tl.{name}" for name, item in names.items() if type(item) is kind and item == value)
    return function_name(value) if hasattr(value, "fn") or hasattr(value, "__code__") else str(value)


def is_checked(launch: Mapping[str, Any], arguments: Mapping[str, Any], signature: Signature) -> bool:
    """Return True if a launch has the arguments of one that was checked, and its constants."""
    own = {name: value for values in launch["constants"] for name, value in values.items()}
    described = signature.described(arguments)
    passed = {name: value for name, value in described.items() if name not in own}
    constants = {name: described.get(name, signature.defaults.get(name)) for name in own}
    same = any(_equal(values, constants) for values in launch["constants"])
    return same and _equal(launch["arguments"], passed)


def _equal(recorded: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return {*recorded} == {*values} and all(
        type(value) is type(values[name]) and value == values[name] for name, value in recorded.items()
    )


def _padded(programs: Any) -> tuple[int, ...]:
    """Return programs in x, y and z."""
    return (*map(int, programs if isinstance(programs, Sequence) else (programs,)), 1, 1)[:3]


class Row(NamedTuple):
    """Config of a key, and the launches that it was checked on."""

    arguments: Mapping[str, Any]
    """Arguments of ``triton.Config``."""
    launches: Sequence[Mapping[str, Any]] = ()

    @property
    def options(self) -> Values:
        """Arguments that change no result."""
        return {name: value for name, value in self.arguments.items() if name != "kwargs" and value is not None}

    def choice(self, arguments: Mapping[str, Any], signature: Signature) -> Choice:
        """Return what a launch takes, whose key is that of the row."""
        constants = {name: decoded(value) for name, value in self.arguments["kwargs"].items()}
        for launch in self.launches:
            choice = Choice(self.options, {**self.options, **constants}, launch["grid"])
            if is_checked(launch, arguments, signature) and choice.suits({**signature.defaults, **arguments}):
                return choice
        return Choice(self.options)

    def own_constants(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the constants that a launch keeps though the row has others."""
        pairs = ((name, decoded(value)) for name, value in self.arguments["kwargs"].items())
        return [name for name, value in pairs if name in arguments and arguments[name] != value]
