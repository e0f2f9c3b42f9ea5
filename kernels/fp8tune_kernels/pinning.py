"""Make kernels take their configs from a table at run time: they are not timed, so every rank launches the same.

Triton's own autotuner still makes the key and launches; only the dictionary in which it looks configs up is another.
``torch.compile`` tunes by itself and reads no such dictionary.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import os
import runpy
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .tuners import (
    HookUnknownError,
    chain,
    decoded,
    flattened,
    function_name,
    hook_for,
    is_kernel,
    resolved,
    tensor_in,
    tuner_of,
    tuning_key,
)

__all__ = ["MODES", "VARIABLE", "PinError", "Table", "is_of", "pin", "pin_to", "tables_of", "unpin"]

MODES = ("off", "strict", "nearest", "tune")

VARIABLE = "FP8TUNE_PIN"
"""Environment variable: one of :data:`MODES`, instead of what programs ask for."""

Key = tuple[Any, ...]
"""A key as Triton's autotuner makes it: values of the key arguments, then the dtype of each tensor as text."""

_logger = logging.getLogger("fp8tune")
_lock = threading.RLock()


class PinError(ValueError):
    """A table or kernel that cannot be pinned, or a key that the table lacks; the text is one line."""


def pin(table: str | os.PathLike[str] | Mapping[Key, Any], kernel: Any = None, *, unknown: str = "nearest") -> None:
    """Make all kernels of a table, or one, take their configs from it instead of timing them.

    ``table``: a file that ``fp8tune export --for python`` wrote, a folder of such files, or, for an autotuned kernel,
    a dict of keys to the arguments of ``triton.Config``:
    ``{(4096, "torch.bfloat16"): {"kwargs": {"BLOCK": 128}, "num_warps": 8}}``. Of a file the configs of the current
    device count, those of a dict on every device. A config gets the ``pre_hook`` that the kernel declares for it.

    ``kernel``: a ``triton.autotune`` kernel with at least two configs, ``triton.heuristics`` around it or not, or a
    bare ``triton.jit`` kernel, whose callers' configs are replaced. Without it the kernels are imported by the names in
    the files. Call ``pin`` before their first launch.

    ``unknown`` says what happens for keys that the table lacks; ``FP8TUNE_PIN`` in the environment overrides it:

    - ``nearest``: the config of the key with equal dtypes, texts and flags whose numbers are nearest on a log scale;
      of configs that the kernel's ``early_config_prune`` refuses for the launch, none. The same on every rank. Raises
      PinError where no such key exists.
    - ``strict``: the launch raises PinError with the key.
    - ``tune``: Triton tunes the key, so ranks may disagree on it.
    - ``off``: the table is not used at all; Triton tunes every key.

    The first launch logs one line (logger ``fp8tune``) with table and keys. So does the first key that is unknown.
    A later ``pin`` of a kernel replaces this one; :func:`unpin` ends it. Raises PinError for a table or kernel that
    cannot be used; then no kernel is pinned.
    """
    mode = os.environ.get(VARIABLE) or unknown
    if mode not in MODES:
        raise PinError(f"unknown={mode!r}: choose one of {', '.join(MODES)}")
    tables = tables_of(table)
    if kernel is None:
        pairs = [(_kernel_named(item), item) for item in tables]
    else:  # of a table alone the kernel may have moved to another module since
        matching = [item for item in tables if is_of(kernel, item)] or (tables if len(tables) == 1 else [])
        if not matching:
            raise PinError(f"no table in {str(table)!r} is of {function_name(_target(kernel))}: export one for it")
        pairs = [(kernel, matching[0])]
    _install([_Pinned(_target(item), of_kernel, mode) for item, of_kernel in pairs])


def pin_to(kernel: Any, table: Table, unknown: str) -> None:
    """Pin one kernel to one table of :func:`tables_of`, whatever the environment says."""
    _install([_Pinned(_target(kernel), table, unknown)])


def _install(pins: list[_Pinned]) -> None:
    for pinned in pins:
        unpin(pinned.target)
        if pinned.mode == "off":
            _logger.warning("%s is not pinned to %s: off", pinned.name, pinned.table.source)
        else:
            pinned.install()


def unpin(kernel: Any = None) -> None:
    """Undo :func:`pin` for a kernel, or for all: Triton tunes it again, with what it had tuned before."""
    for pinned in list(_pins.values()):
        if kernel is None or pinned.target is _target(kernel):
            del _pins[id(pinned.target)]
            pinned.uninstall()


def _target(kernel: Any) -> Any:
    """Return the autotuner of a kernel, else the bare jitted function."""
    every = [item for item in chain(kernel) if is_kernel(item)]
    if not every:
        name = getattr(kernel, "__name__", None) or type(kernel).__name__
        raise PinError(f"{name} is no Triton kernel: pin a kernel of triton.autotune or triton.jit")
    return tuner_of(kernel) or every[-1]


@dataclass(frozen=True)
class Table:
    """Configs of one kernel."""

    source: str
    devices: Mapping[str, Mapping[Key, Any]]
    """Device name, or ``""`` for every device -> key -> arguments of ``triton.Config``."""
    kernel: str = ""
    """``module:attribute``; empty for a dict."""
    names: tuple[str, ...] = ()
    """The arguments of a key."""


def tables_of(table: Any) -> list[Table]:
    """Return what :func:`pin` is called with as a table for each kernel. Raises PinError."""
    if isinstance(table, Mapping):
        return [Table("a dict", {"": table})]
    if not isinstance(table, str | os.PathLike):
        raise PinError(f"{table!r:.80} is no table: give a file of fp8tune export --for python, its folder or a dict")
    if not (path := Path(table)).is_dir():
        return [_read(path)]
    tables: dict[str, Table] = {}
    for file in sorted(path.glob("*.py")):
        if "\nKERNEL = " in file.read_text(encoding="utf-8", errors="replace"):
            read = _read(file)
            before = tables.get(read.kernel, read).devices  # a kernel may have a file for each arch
            tables[read.kernel] = replace(read, devices={**before, **read.devices})
    if not tables:
        raise PinError(f"no table is in {str(path)!r}: write one with fp8tune export --for python")
    return list(tables.values())


def _read(path: Path) -> Table:
    try:
        names = runpy.run_path(str(path))
        return Table(str(path), dict(names["TABLE"]), names["KERNEL"], tuple(names.get("KEY", ())))
    except (Exception, SystemExit) as error:
        reason = f"{path} is no table that can be read: {_one_line(error)}"
        raise PinError(f"{reason}: write one with fp8tune export --for python") from error


def _kernel_named(table: Table) -> Any:
    """Return the kernel of a table; imports its module unless the program has."""
    if not table.kernel:
        raise PinError("a dict names no kernel: pass the kernel behind it")
    where, _, attribute = table.kernel.rpartition(":")
    try:
        return resolved(_loaded(where) or importlib.import_module(where), attribute)
    except (ImportError, AttributeError, LookupError, TypeError) as error:
        reason = f"{table.source} is of {table.kernel}, which cannot be imported: {_one_line(error, 100)}"
        raise PinError(f"{reason}: import its module first, or pass the kernel behind the table") from None


def _loaded(where: str) -> Any:
    """Return a module of this program by its name, or by its file ``path.py``."""
    if not where.endswith(".py"):
        return sys.modules.get(where)
    path = Path(where).absolute()
    files = ((item, getattr(item, "__file__", None)) for item in list(sys.modules.values()))
    return next((item for item, file in files if file and Path(file).absolute() == path), None)


def is_of(kernel: Any, table: Table) -> bool:
    """Return True if the table names the kernel; the attribute may be called otherwise than its function."""
    target = _target(kernel)
    where, _, attribute = table.kernel.rpartition(":")
    try:
        return any(item is target for item in chain(resolved(_loaded(where), attribute)))
    except (AttributeError, LookupError):
        return table.kernel == function_name(target)


class _Pinned(dict[Key, Any]):
    """Stand-in for the autotuner's dictionary: keys that were launched -> configs, which a first launch looks up."""

    def __init__(self, target: Any, table: Table, mode: str) -> None:
        super().__init__()
        self.target, self.table, self.name, self.mode = target, table, function_name(target), mode
        self._is_tuner = hasattr(target, "configs")
        if self._is_tuner and len(target.configs) < 2:
            raise PinError(f"{self.name} declares one config, which Triton never looks up: edit that one")
        if not self._is_tuner and not table.names:
            raise PinError(f"{self.name} has no autotuner: pin a file of fp8tune export --for python, not a dict")
        # a subclass may launch by itself and never look into ``cache``
        self._looks_up = type(target).run is importlib.import_module("triton.runtime.autotuner").Autotuner.run
        self._configs = {device: self._triton_configs(rows) for device, rows in table.devices.items()}
        self._launching = threading.local()
        self._has_logged = False

    def _triton_configs(self, rows: Any) -> dict[Key, Any]:
        source, declared = self.table.source, getattr(self.target, "configs", ())
        make: Any = sys.modules["triton"].Config
        try:
            configs = {_plain(key): make(**row) for key, row in rows.items()}
            for config in configs.values():
                config.kwargs = {name: decoded(value) for name, value in config.kwargs.items()}
                config.pre_hook = hook_for(config, declared)
        except HookUnknownError:
            reason = f"{source} has a config that {self.name} does not declare, and its pre_hooks differ"
            raise PinError(reason) from None
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise PinError(f"{source} has a row that cannot be used: {_one_line(error)}: export it again") from error
        names = {name for config in configs.values() for name in config.kwargs}
        if strange := sorted(names - set(self.target.arg_names)):
            raise PinError(f"{source} is of another kernel: {self.name} has no argument {strange[0]!r}")
        return configs

    def install(self) -> None:
        """Put this in the place of what the kernel had tuned."""
        self._run = self.target.run
        if not self._looks_up:
            self.target.run = self._run_with_config
        else:
            self._before, self.target.cache = self.target.cache, self
            if self.mode == "nearest" and self.target.early_config_prune:
                self.target.run = self._run_noting_arguments
        _pins[id(self.target)] = self

    def uninstall(self) -> None:
        """Put back what was there before."""
        vars(self.target).pop("run", None)
        if self._looks_up:
            self.target.cache = self._before

    def _run_noting_arguments(self, *args: Any, **kwargs: Any) -> Any:
        self._launching.kwargs = kwargs  # which pruning reads
        return self._run(*args, **kwargs)

    def _run_with_config(self, *args: Any, **kwargs: Any) -> Any:
        """Launch a bare kernel, or one whose autotuner has a ``run`` of its own, with the config of the table."""
        arguments = {**dict(zip(self.target.arg_names, args, strict=False)), **kwargs}
        key = tuning_key(self.target, args, kwargs) if self._is_tuner else self._bare_key(arguments)
        if key not in self:
            return self._run(*args, **kwargs)
        config = self[key]
        arguments |= config.all_kwargs()
        if config.pre_hook is not None:
            config.pre_hook(arguments)
        return (self.target.fn.run if self._is_tuner else self._run)(**arguments)

    def _bare_key(self, arguments: Mapping[str, Any]) -> Key:
        own = [(name, arguments[name]) for name in self.target.arg_names if name in arguments]
        memory = [tensor_in(value) for item in own for _, value in flattened(*item)]
        sizes = (arguments[name] for name in self.table.names if name in arguments)
        return (*sizes, *(str(tensor.dtype) for tensor in memory if tensor is not None))

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or self._find(key)

    def _find(self, key: Any) -> bool:
        with _lock:
            plain = _plain(key)
            config = self._rows[plain] if plain in self._rows else self._unknown(plain)
            if config is not None:
                self[key] = config
            return config is not None

    @functools.cached_property
    def _rows(self) -> Mapping[Key, Any]:
        """Configs of the device that launches first."""
        device = "" if "" in self._configs else _device_name()
        rows = self._configs.get(device, {})
        where = device or "any device"
        where += "" if rows else f" (it has {', '.join(self._configs) or 'no device'})"
        keys = "1 key" if len(rows) == 1 else f"{len(rows)} keys"
        line = f"{keys} for {where}; unknown keys: {self.mode}"
        _logger.warning("%s is pinned to %s: %s", self.name, self.table.source, line)
        return rows

    def _unknown(self, key: Key) -> Any:
        line = f"{self.name}: {self.table.source} has no config for the key {key}"
        if self.mode == "strict":
            raise PinError(f"{line}: sweep it, or pin with unknown='tune'")
        if self.mode == "tune":
            return self._log_once(f"{line}: Triton tunes it, and any other such key")
        distances = ((_distance(key, known), repr(known), known) for known in self._rows)
        for _, _, known in sorted(item for item in distances if item[0] < math.inf):
            if self._is_allowed(self._rows[known]):
                self._log_once(f"{line}: launched with that of {known}; other such keys alike")
                return self._rows[known]
        raise PinError(f"{line}, nor one with the same dtypes, texts and flags: pin with unknown='tune'")

    def _log_once(self, line: str) -> None:
        """Log the first key that is unknown: others would repeat it."""
        if not self._has_logged:
            self._has_logged = True
            _logger.warning("%s", line)

    def _is_allowed(self, config: Any) -> bool:
        prune = self.target.early_config_prune if self._looks_up else None
        return not prune or config in prune([config], self.target.nargs, **self._launching.kwargs)


_pins: dict[int, _Pinned] = {}
"""id of an autotuner or bare kernel -> its table."""


def _plain(key: Any) -> Key:
    """Return the key with dtypes and the like as text: a table imports neither torch nor Triton."""
    return tuple(item if item is None or isinstance(item, bool | int | float | str) else str(item) for item in key)


def _distance(key: Key, known: Key) -> float:
    """Return the distance of two keys in powers of two; infinite where they differ in more than numbers."""
    total = 0.0 if len(key) == len(known) else math.inf
    for left, right in zip(key, known, strict=False):
        pair = (left, right)
        if all(isinstance(item, int | float) and type(item) is not bool and math.isfinite(item) for item in pair):
            powers = [math.copysign(math.log2(1 + abs(item)), item) for item in pair]  # for zero and below too
            total += abs(powers[0] - powers[1])
        elif type(left) is not type(right) or left != right:
            return math.inf
    return total


def _device_name() -> str:
    cuda = sys.modules["torch"].cuda
    return str(cuda.get_device_name()) if cuda.is_available() else "Triton interpreter"


def _one_line(error: BaseException, longest: int = 300) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()) or type(error).__name__}"[:longest]
