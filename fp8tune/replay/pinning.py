"""At run time: kernels take their configs from a table and are not timed, so every rank launches the same.

``fp8tune.pin(kernel, "tables/softmax.py")`` after the kernel's definition and before its first launch. Triton's own
autotuner still makes the key and launches; only the dictionary in which it looks configs up is another. The table may
be a file of ``fp8tune export --for python``. ``torch.compile`` tunes by itself and reads no such dictionary.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8tune.errors import UsageError, one_line
from fp8tune.replay.arguments import flattened, tensor_in
from fp8tune.replay.naming import chain, function_name, is_kernel, resolved, tuner_of
from fp8tune.replay.values import UnknownHookError, decoded_items, hook_for
from fp8tune.replay.watch.kernel import tuning_key

MODES = ("off", "strict", "nearest", "tune")

VARIABLE = "FP8TUNE_PIN"
"""Environment variable: one of :data:`MODES`, instead of what programs ask for."""

Key = tuple[Any, ...]
"""A key as Triton's autotuner makes it: values of the key arguments, then the dtype of each tensor as text."""

Table = str | os.PathLike[str] | ModuleType | Mapping[Key, Any]

_logger = logging.getLogger("fp8tune")
_pinning = threading.Lock()


def pin(kernel: Any, table: Table, unknown: str = "tune") -> None:
    """Make a kernel take its configs from a table instead of timing them.

    ``kernel``: a ``triton.autotune`` kernel with at least two configs, ``triton.heuristics`` around it or not, or a
    bare ``triton.jit`` kernel, whose callers' configs are replaced. ``table``: a file that ``fp8tune export --for
    python`` wrote, that file as an imported module, a folder of such files, of which the kernel's is read, or, for an
    autotuned kernel, a mapping of keys to the arguments of ``triton.Config``:
    ``{(4096, "torch.bfloat16"): {"kwargs": {"BLOCK": 128}, "num_warps": 8}}``. Of a file the configs of the current
    device count, those of a mapping on every device. A config gets the ``pre_hook`` that the kernel declares for it.

    ``unknown`` says what happens for keys that the table lacks; ``FP8TUNE_PIN`` in the environment overrides it:

    - ``off``: the table is not used at all; Triton tunes every key.
    - ``strict``: the launch raises UsageError with the key.
    - ``nearest``: the config of the key with equal dtypes, texts and flags whose numbers are nearest on a log scale;
      of configs that the kernel's ``early_config_prune`` refuses for the launch, none. The same on every rank. Raises
      UsageError where no such key exists.
    - ``tune``: Triton tunes the key, so ranks may disagree on it.

    The first launch logs one line (logger ``fp8tune``): table, keys, evidence. So does the first key that is unknown.
    A later ``pin`` of the kernel replaces this one; :func:`unpin` ends it. Raises TypeError for what is no kernel,
    UsageError for a table that cannot be used.
    """
    target = _target(kernel)
    mode = os.environ.get(VARIABLE) or unknown
    if mode not in MODES:
        raise UsageError(f"unknown={mode!r}: choose one of {', '.join(MODES)}")
    if len(getattr(target, "configs", (0, 0))) < 2:
        raise UsageError(f"{function_name(target)} declares one config, which Triton never looks up: edit that one")
    unpin(kernel)
    if mode == "off":
        source = getattr(table, "__name__", "a mapping" if isinstance(table, Mapping) else table)
        _logger.warning("%s is not pinned to %s: off", function_name(target), source)
        return
    pinned = _Pinned(target, _read(table, target), mode)
    with _pinning:
        if not _looks_up(target):
            target.run = pinned.run_with_config
        else:
            target.cache = pinned
            if mode == "nearest" and target.early_config_prune:
                target.run = pinned.run
        _PINNED[id(target)] = pinned


def unpin(kernel: Any) -> None:
    """Let the kernel tune again, with what it had tuned before; nothing where it is not pinned."""
    target = _target(kernel)
    with _pinning:
        if (pinned := _PINNED.pop(id(target), None)) is not None:
            vars(target).pop("run", None)
            if pinned.before is not None:
                target.cache = pinned.before


def _target(kernel: Any) -> Any:
    """Return the autotuner of a kernel, else the bare jitted function."""
    every = [item for item in chain(kernel) if is_kernel(item)]
    tuner = tuner_of(kernel)
    if tuner is None and not every:
        name = getattr(kernel, "__name__", None) or type(kernel).__name__
        raise TypeError(f"{name} is no Triton kernel: pin a kernel of triton.autotune or triton.jit")
    return every[-1] if tuner is None else tuner


def _looks_up(target: Any) -> bool:
    """Return True for Triton's own autotuner, which looks configs up in ``cache``."""
    module = importlib.import_module("triton.runtime.autotuner")
    return getattr(type(target), "run", None) is module.Autotuner.run


@dataclass(frozen=True)
class _Read:
    """A table as the user gave it."""

    source: str
    devices: Mapping[str, Mapping[Key, Any]]
    """Device name, or ``""`` for every device -> key -> arguments of ``triton.Config``."""
    evidence: Mapping[str, Mapping[Key, str]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    """The arguments of a key."""


class _Pinned(dict[Key, Any]):
    """The autotuner's dictionary: keys that were launched -> configs. The first launch of a key asks the table."""

    def __init__(self, target: Any, read: _Read, mode: str) -> None:
        super().__init__()
        self.before = getattr(target, "cache", None) if _looks_up(target) else None
        self._target, self._read, self._mode, self._name = target, read, mode, function_name(target)
        self._configs = _configs(target, read)  # now: a table that cannot be used is refused before any launch
        self._lock = threading.RLock()
        self._launching = threading.local()
        self._run = target.run
        self._has_logged = False

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or self._find(key)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the autotuner's own ``run``; keeps the arguments by name, which pruning reads."""
        self._launching.kwargs = kwargs
        return self._run(*args, **kwargs)

    def run_with_config(self, *args: Any, **kwargs: Any) -> Any:
        """Launch a bare kernel, or one whose autotuner has a ``run`` of its own, with the config of the table."""
        named = {**dict(zip(self._target.arg_names, args, strict=False)), **kwargs}
        is_tuner = hasattr(self._target, "configs")
        key = tuning_key(self._target, args, kwargs) if is_tuner else self._bare_key(named)
        if key not in self:
            return self._run(*args, **kwargs)
        config = self[key]
        named |= config.all_kwargs()
        if config.pre_hook is not None:
            config.pre_hook(named)
        return (self._target.fn.run if is_tuner else self._run)(**named)

    def _bare_key(self, named: Mapping[str, Any]) -> Key:
        parameters = [name for name in self._target.arg_names if name in named]
        tensors = [tensor_in(value) for name in parameters for _, value in flattened(name, named[name])]
        sizes = (named[name] for name in self._read.names if name in named)
        return (*sizes, *(str(tensor.dtype) for tensor in tensors if tensor is not None))

    @functools.cached_property
    def _table(self) -> Mapping[Key, Any]:
        """The configs of the device that launches first."""
        device = "" if "" in self._configs else _device_name()
        configs, evidence = self._configs.get(device, {}), self._read.evidence.get(device, {})
        first = next((evidence[key] for key in self._read.devices.get(device, ()) if key in evidence), "none given")
        where = device or "any device"
        where += "" if configs else f" (it has {', '.join(self._read.devices) or 'no device'})"
        keys = "1 key" if len(configs) == 1 else f"{len(configs)} keys"
        line = f"{keys} for {where}; evidence of the first: {first}; unknown keys: {self._mode}"
        _logger.warning("%s is pinned to %s: %s", self._name, self._read.source, line)
        return configs

    def _find(self, key: Any) -> bool:
        with self._lock:
            plain = _plain(key)
            config = self._table[plain] if plain in self._table else self._unknown(plain)
            if config is not None:
                self[key] = config
            return config is not None

    def _unknown(self, key: Key) -> Any:
        line = f"{self._name}: {self._read.source} has no config for the key {key}"
        if self._mode == "strict":
            raise UsageError(f"{line}: sweep it, or pin with unknown='tune'")
        if self._mode == "tune":
            return self._log_once(f"{line}: Triton tunes it, and any other such key")
        alike = [
            (distance, repr(known), known) for known in self._table if (distance := _distance(key, known)) < math.inf
        ]
        for _, _, known in sorted(alike):
            if self._is_allowed(self._table[known]):
                self._log_once(f"{line}: launched with that of {known}; other such keys alike")
                return self._table[known]
        raise UsageError(f"{line}, nor one with the same dtypes, texts and flags: pin with unknown='tune'")

    def _log_once(self, line: str) -> None:
        """Log the first key that is unknown: others would repeat it."""
        if not self._has_logged:
            self._has_logged = True
            _logger.warning("%s", line)

    def _is_allowed(self, config: Any) -> bool:
        prune = getattr(self._target, "early_config_prune", None)
        if not prune or not _looks_up(self._target):
            return True
        return config in prune([config], self._target.nargs, **self._launching.kwargs)


_PINNED: dict[int, _Pinned] = {}
"""id of an autotuner or bare kernel -> its table."""


def _read(table: Table, target: Any) -> _Read:
    if isinstance(table, Mapping):
        return _Read("a mapping", {"": table})
    if isinstance(table, ModuleType):
        return _vendored(vars(table), table.__name__)
    path = Path(table)
    if not path.is_dir():
        return _vendored(_run(path), str(path))
    for file in sorted(path.glob("*.py")):
        if _is_of(target, str((names := _run(file)).get("KERNEL"))):
            return _vendored(names, str(file))
    name = function_name(target)
    raise UsageError(f"no table in {str(path)!r} is of {name}: write one with fp8tune export --for python")


def _is_of(target: Any, name: str) -> bool:
    """Return True if ``module:attribute`` holds the kernel; the attribute may be called otherwise than its function."""
    module, _, attribute = name.partition(":")
    if name == function_name(target):
        return True
    try:
        return any(item is target for item in chain(resolved(sys.modules[module], attribute)))
    except (AttributeError, LookupError):
        return False


def _run(path: Path) -> Mapping[str, Any]:
    try:
        return runpy.run_path(str(path))
    except (Exception, SystemExit) as error:
        raise UsageError(f"cannot read the table {str(path)!r}: {one_line(error)}") from error


def _vendored(names: Mapping[str, Any], source: str) -> _Read:
    devices, evidence, key = names.get("TABLE"), names.get("EVIDENCE", {}), names.get("KEY", ())
    if not isinstance(devices, Mapping) or not isinstance(evidence, Mapping) or not isinstance(key, Sequence):
        raise UsageError(f"{source} is no table: write one with fp8tune export --for python")
    return _Read(source, devices, evidence, tuple(key))


def _configs(target: Any, read: _Read) -> dict[str, dict[Key, Any]]:
    """Return device -> key -> config as Triton takes it, with the ``pre_hook`` that the kernel declares for it."""
    from triton import Config

    name, configs = function_name(target), dict[str, dict[Key, Any]]()
    if not hasattr(target, "configs") and not read.names:
        raise UsageError(f"{name} has no autotuner: pin a file of fp8tune export --for python, not a mapping")
    try:
        for device, rows in read.devices.items():
            configs[device] = {_plain(key): Config(**row) for key, row in rows.items()}
            for config in configs[device].values():
                config.kwargs = decoded_items(config.kwargs)
                config.pre_hook = hook_for(config, getattr(target, "configs", ()))
    except UnknownHookError:
        raise UsageError(f"{read.source} has a config that {name} does not declare, and its pre_hooks differ") from None
    except (TypeError, ValueError, AttributeError, KeyError, UsageError) as error:
        raise UsageError(f"{read.source} has a row that cannot be used: {one_line(error)}: export it again") from error
    arguments = {argument for rows in configs.values() for config in rows.values() for argument in config.kwargs}
    if strange := sorted(arguments - set(target.arg_names)):
        raise UsageError(f"{read.source} is of another kernel: {name} has no argument {strange[0]!r}")
    return configs


def _plain(key: Any) -> Key:
    """Return the key with dtypes and the like as text: a table imports neither torch nor Triton."""
    return tuple(item if item is None or isinstance(item, bool | int | float | str) else str(item) for item in key)


def _distance(key: Key, known: Key) -> float:
    """Return the distance of two keys in powers of two; infinite where they differ in more than numbers."""
    return math.fsum(map(_apart, key, known)) if len(key) == len(known) else math.inf


def _apart(left: Any, right: Any) -> float:
    if all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in (left, right)):
        return abs(_log(left) - _log(right))
    return 0.0 if type(left) is type(right) and left == right else math.inf


def _log(number: float) -> float:
    """Return a size's power of two; defined for zero and below too."""
    return math.copysign(math.log2(1 + abs(number)), number)


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "Triton interpreter"
