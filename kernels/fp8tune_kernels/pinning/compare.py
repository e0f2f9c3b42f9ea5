"""Compare a table with its kernel as it is now: its code, its key and the configs that it declares."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..agreement import ranks
from ..identity import UnknownCodeError, code_hash
from ..tuners import HookUnknownError, backend_options, decoded, function_name, hook_for, python_function, resolved
from .errors import PinError, one_line
from .keys import Key
from .tables import Table
from .targets import loaded_module, named, target_of

DTYPES = "the dtype of each tensor"
"""Last name of a key in a file, which stands for the dtypes that follow the arguments."""

AGAIN = "sweep it again and export it again"


def changed_devices(target: Any, table: Table) -> frozenset[str]:
    """Return the devices whose configs were measured with other code than the kernel has now."""
    if table.insists or not any(table.codes.values()):
        return frozenset()
    code = current_code(target, table)
    return frozenset(device for device in table.devices if table.codes.get(device) != code)


def moved(kernel: Any, table: Table) -> bool:
    """Return True for a kernel of another module that is the table's: of its name, or with its code."""
    target, (_, _, name) = target_of(kernel), table.kernel.rpartition(":")
    is_alike = not table.kernel or python_function(target).__name__ == name.rpartition(".")[2]
    return is_alike or current_code(target, table) in {*table.codes.values()} - {""}


def current_code(target: Any, table: Table) -> str:
    """Return the hash of a kernel's code as it is now; empty where there is no source of it."""
    function, attribute = python_function(target), table.kernel.rpartition(":")[2]
    original, name = named(table, function), function_name(target)
    if original is not None and python_function(original) is function:
        name = table.kernel
    else:  # it moved: its attribute may be called otherwise than its function
        with contextlib.suppress(AttributeError, LookupError, PinError):
            if target_of(resolved(loaded_module(function.__module__), attribute)) is target:
                name = f"{function.__module__}:{attribute}"
    return _code(name, Path(function.__code__.co_filename))


def _code(kernel: str, path: Path) -> str:
    """Return a hash by the name of a module; by its file where it is found by no name, or by a relative path."""
    for file in (path,) if kernel.rpartition(":")[0].endswith(".py") else (None, path):
        with contextlib.suppress(UnknownCodeError):
            return code_hash(kernel, file)
    return ""


def change_of(table: Table, name: str) -> str:
    """Return what to say of a table whose kernel has changed."""
    return f"{name}: {table.source} was measured with other code of it: {AGAIN}, or pin it with stale='use'"


def are_several_ranks() -> bool:
    """Return True in a job of several ranks, which may disagree on what they tune."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_world_size() > 1)
    return ranks.is_pending


def check_key(target: Any, table: Table, name: str) -> None:
    """Raise PinError if the arguments of the table's keys are not those of the kernel's, in their order."""
    names = tuple(item for item in table.names if item != DTYPES)
    if not names and not hasattr(target, "configs"):
        return
    if hasattr(target, "keys") and names:
        current = tuple(map(str, target.keys))
        if names != current:
            both = f"the key ({', '.join(names)}), and {name} has ({', '.join(current)})"
            raise PinError(f"{table.source} has {both}: {AGAIN}")
    elif strange := [item for item in names if item not in target.arg_names]:
        raise PinError(f"{table.source} has {strange[0]!r} in its key, which is no argument of {name}: {AGAIN}")


def configs_of(target: Any, table: Table, device: str, name: str) -> dict[Key, Any]:
    """Return the rows of a device as configs of Triton.

    A declared one is the kernel's own, with its ``pre_hook``. Raises PinError for a config of another kernel, or one
    that an autotuned kernel does not declare and that was not checked with its code.
    """
    declared = getattr(target, "configs", None)
    has_code, unchecked = bool(table.codes.get(device)), table.unchecked.get(device, {})
    result = {}
    for key, row in table.devices[device].items():
        try:
            config = _config(row)
            same = next((item for item in declared or () if _values(item) == _values(config)), None)
            if same is None:
                config.pre_hook = hook_for(config, declared or ())
        except HookUnknownError:
            reason = f"{table.source} has a config that {name} does not declare, and its pre_hooks differ"
            raise PinError(reason) from None
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise PinError(
                f"{table.source} has a row that cannot be used: {one_line(error)}: export it again"
            ) from error
        if same is None and (strange := sorted({*config.kwargs} - {*target.arg_names} - backend_options())):
            raise PinError(f"{table.source} is of another kernel: {name} has no argument {strange[0]!r}")
        if same is None and declared is not None:
            is_checked = table.insists or (has_code and key not in unchecked)
            _check_undeclared(config, target, table, name, is_checked=is_checked)
        result[key] = config if same is None else same
    return result


def _config(row: Mapping[str, Any]) -> Any:
    config: Any = sys.modules["triton"].Config(**row)
    config.kwargs = {name: decoded(value) for name, value in config.kwargs.items()}
    return config


def _values(config: Any) -> Any:
    """Return the values of a config with their types: 16, 16.0 and True differ."""
    return {name: (type(value), value) for name, value in config.all_kwargs().items()}


def _check_undeclared(config: Any, target: Any, table: Table, name: str, *, is_checked: bool) -> None:
    """Raise PinError for a config that the kernel does not declare, unless it was checked or the user insists.

    Whoever insists may set the arguments that a declared config sets, to values of the same types.
    """
    declared, names = target.configs, target.arg_names
    text = ", ".join(f"{item}={value!r:.40}" for item, value in config.all_kwargs().items())
    if not is_checked:
        fix = "declare it, or pin with stale='use' to use it unchecked"
        raise PinError(f"{table.source} has an unchecked config that {name} does not declare ({text:.200}): {fix}")
    forms = [{item: type(value) for item, value in config.kwargs.items() if item in names} for config in declared]
    if table.insists and {item: type(value) for item, value in config.kwargs.items() if item in names} not in forms:
        raise PinError(f"{table.source} has a config that {name} cannot have ({text:.200}): {AGAIN}")
