"""At run time: an autotuned kernel takes its configs from a table and is not timed, so every rank launches the same.

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8tune.errors import UsageError, one_line

MODES = ("off", "strict", "nearest", "tune")

VARIABLE = "FP8TUNE_PIN"
"""Environment variable: one of :data:`MODES`, instead of what programs ask for."""

Key = tuple[Any, ...]
"""As Triton's autotuner makes it: the values of the key arguments, then the dtype of each tensor as text."""

Table = str | os.PathLike[str] | ModuleType | Mapping[Key, Any]

_logger = logging.getLogger("fp8tune")
_pinning = threading.Lock()


def pin(kernel: Any, table: Table, unknown: str = "tune") -> None:
    """Make an autotuned kernel take its configs from a table instead of timing them.

    ``kernel``: a ``triton.autotune`` kernel, ``triton.heuristics`` around it or not, with at least two configs.
    ``table``: a file that ``fp8tune export --for python`` wrote, that file as an imported module, a folder of such
    files, of which the kernel's is read, or a mapping of keys to the arguments of ``triton.Config``:
    ``{(4096, "torch.bfloat16"): {"kwargs": {"BLOCK": 128}, "num_warps": 8}}``. Of a file the configs of the current
    device count, those of a mapping on every device.

    ``unknown`` says what happens for keys that the table lacks; ``FP8TUNE_PIN`` in the environment overrides it:

    - ``off``: the table is not used at all; Triton tunes every key.
    - ``strict``: the launch raises UsageError with the key.
    - ``nearest``: the config of the key with equal dtypes, texts and flags whose numbers are nearest on a log scale;
      of configs that the kernel's ``early_config_prune`` refuses for the launch, none. The same on every rank. Raises
      UsageError where no such key exists.
    - ``tune``: Triton tunes the key, so ranks may disagree on it.

    The first launch logs one line (logger ``fp8tune``): table, keys, evidence. So does the first key that is unknown.
    A later ``pin`` of the kernel replaces this one; :func:`unpin` ends it. Raises TypeError for a kernel without an
    autotuner, UsageError for a table that cannot be used.
    """
    autotuner = _autotuner(kernel)
    mode = os.environ.get(VARIABLE) or unknown
    if mode not in MODES:
        raise UsageError(f"unknown={mode!r}: choose one of {', '.join(MODES)}")
    if len(autotuner.configs) < 2:
        raise UsageError(f"{_name(autotuner)} declares one config, which Triton never looks up: edit that one")
    unpin(kernel)
    if mode == "off":
        _logger.warning("%s is not pinned to %s: off", _name(autotuner), _called(table))
        return
    pinned = _Pinned(autotuner, _read(table, autotuner), mode)
    with _pinning:
        autotuner.cache = pinned
        if mode == "nearest" and autotuner.early_config_prune:
            autotuner.run = pinned.run


def unpin(kernel: Any) -> None:
    """Let the kernel tune again, with what it had tuned before; nothing where it is not pinned."""
    autotuner = _autotuner(kernel)
    with _pinning:
        if isinstance(autotuner.cache, _Pinned):
            autotuner.cache = autotuner.cache.before
            vars(autotuner).pop("run", None)


@dataclass(frozen=True)
class _Read:
    """A table as it was given."""

    source: str
    devices: Mapping[str, Mapping[Key, Any]]
    """By device name; ``""`` for every device."""
    evidence: Mapping[str, Mapping[Key, str]] = field(default_factory=dict)
    """By device name."""

    def of_this_device(self) -> tuple[str, Mapping[Key, Any]]:
        """Its name and configs."""
        if "" in self.devices:
            return "any device", self.devices[""]
        name = _device_name()
        return name, self.devices.get(name, {})


class _Pinned(dict[Key, Any]):
    """The autotuner's dictionary: keys that were launched -> configs. The first launch of a key asks the table."""

    def __init__(self, autotuner: Any, read: _Read, mode: str) -> None:
        super().__init__()
        self.before = autotuner.cache
        self._autotuner, self._read, self._mode = autotuner, read, mode
        self._configs = _configs(autotuner, read)  # now: a table that cannot be used is refused before any launch
        self._lock = threading.RLock()
        self._launching = threading.local()
        self._run = autotuner.run
        self._has_said = False

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or self._find(key)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The autotuner's own; keeps the arguments by name, which pruning reads."""
        self._launching.kwargs = kwargs
        return self._run(*args, **kwargs)

    @functools.cached_property
    def _table(self) -> Mapping[Key, Any]:
        """Of the device that launches first."""
        device, rows = self._read.of_this_device()
        configs = self._configs.get(device, self._configs.get("", {}))
        evidence = self._read.evidence.get(device, {})
        first = next((evidence[key] for key in rows if key in evidence), "none given")
        where = device if configs else f"{device} (it has {', '.join(self._read.devices) or 'no device'})"
        keys = "1 key" if len(configs) == 1 else f"{len(configs)} keys"
        said = f"{keys} for {where}; evidence of the first: {first}; unknown keys: {self._mode}"
        _logger.warning("%s is pinned to %s: %s", _name(self._autotuner), self._read.source, said)
        return configs

    def _say(self, line: str) -> None:
        """Of the first key that is unknown: others would repeat it."""
        if not self._has_said:
            self._has_said = True
            _logger.warning("%s", line)

    def _find(self, key: Any) -> bool:
        with self._lock:
            plain = _plain(key)
            config = self._table.get(plain)
            if config is None:
                config = self._unknown(plain)
            if config is not None:
                self[key] = config
            return config is not None

    def _unknown(self, key: Key) -> Any:
        line = f"{_name(self._autotuner)}: {self._read.source} has no config for the key {key}"
        if self._mode == "strict":
            raise UsageError(f"{line}: sweep it, or pin with unknown='tune'")
        if self._mode == "tune":
            self._say(f"{line}: Triton tunes it, and any other such key")
            return None
        alike = [each for each in self._table if _distance(key, each) < math.inf]
        alike.sort(key=lambda each: (_distance(key, each), repr(each)))
        for each in alike:
            if self._is_allowed(self._table[each]):
                self._say(f"{line}: launched with that of {each}; other such keys alike")
                return self._table[each]
        raise UsageError(f"{line}, nor one with the same dtypes, texts and flags: pin with unknown='tune'")

    def _is_allowed(self, config: Any) -> bool:
        prune = self._autotuner.early_config_prune
        return not prune or config in prune([config], self._autotuner.nargs, **self._launching.kwargs)


def _autotuner(kernel: Any) -> Any:
    from triton.runtime.autotuner import Autotuner

    found = next((each for each in _wrapped(kernel) if isinstance(each, Autotuner)), None)
    if found is None:
        name = getattr(kernel, "__name__", None) or type(kernel).__name__
        raise TypeError(f"{name} has no triton.autotune: pin an autotuned kernel")
    return found


def _wrapped(kernel: Any) -> Iterator[Any]:
    """A kernel and what its decorators stand around, outermost first."""
    while kernel is not None:
        yield kernel
        kernel = getattr(kernel, "fn", None)


def _name(autotuner: Any) -> str:
    function = autotuner.base_fn
    return f"{function.__module__}:{function.__qualname__}"


def _called(table: Table) -> str:
    if isinstance(table, ModuleType):
        return table.__name__
    return "a mapping" if isinstance(table, Mapping) else str(Path(table))


def _read(table: Table, autotuner: Any) -> _Read:
    if isinstance(table, Mapping):
        return _Read("a mapping", {"": table})
    if isinstance(table, ModuleType):
        return _vendored(vars(table), table.__name__)
    path = Path(table)
    if not path.is_dir():
        return _vendored(_run(path), str(path))
    for file in sorted(path.glob("*.py")):
        if _is_of(autotuner, str((names := _run(file)).get("KERNEL"))):
            return _vendored(names, str(file))
    raise UsageError(f"no table in {str(path)!r} is of {_name(autotuner)}: write one with fp8tune export --for python")


def _is_of(autotuner: Any, name: str) -> bool:
    """Whether ``module:attribute`` is the kernel: by what it holds, since an attribute may be called otherwise."""
    module, _, attribute = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    return name == _name(autotuner) or (found is not None and autotuner in _wrapped(found))


def _run(path: Path) -> Mapping[str, Any]:
    try:
        return runpy.run_path(str(path))
    except (Exception, SystemExit) as error:
        raise UsageError(f"cannot read the table {str(path)!r}: {one_line(error)}") from error


def _vendored(names: Mapping[str, Any], source: str) -> _Read:
    devices, evidence = names.get("TABLE"), names.get("EVIDENCE", {})
    if not isinstance(devices, Mapping) or not isinstance(evidence, Mapping):
        raise UsageError(f"{source} is no table: write one with fp8tune export --for python")
    return _Read(source, devices, evidence)


def _configs(autotuner: Any, read: _Read) -> dict[str, dict[Key, Any]]:
    """Device -> key -> config as Triton takes it."""
    try:
        return {
            device: {_plain(key): _config(autotuner, config, read.source) for key, config in rows.items()}
            for device, rows in read.devices.items()
        }
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise UsageError(f"{read.source} has a row that cannot be used: {one_line(error)}: export it again") from error


def _config(autotuner: Any, given: Any, source: str) -> Any:
    """A row's config, with the pre_hook of the declared one where it is declared."""
    from triton import Config

    config = Config(**given)
    config.kwargs = {name: _value(value) for name, value in config.kwargs.items()}
    if strange := sorted(set(config.kwargs) - set(autotuner.arg_names)):
        raise UsageError(f"{source} is of another kernel: {_name(autotuner)} has no argument {strange[0]!r}")
    declared = [one for one in autotuner.configs if one.all_kwargs() == config.all_kwargs()]
    hooks = {one.pre_hook for one in declared or autotuner.configs}
    if len(hooks) > 1:
        raise UsageError(f"{source} has a config that {_name(autotuner)} does not declare, and its pre_hooks differ")
    (config.pre_hook,) = hooks
    return config


def _value(value: Any) -> Any:
    """A config's value, dtypes as recordings write them: ``{"dtype": "tl.float32"}``."""
    if not isinstance(value, Mapping):
        return value
    package, _, name = value["dtype"].partition(".")
    module = importlib.import_module({"torch": "torch", "tl": "triton.language"}[package])
    return getattr(module, name) if hasattr(module, name) else module.dtype(name)  # tl.float32 calls itself fp32


def _plain(key: Any) -> Key:
    """The key with dtypes and the like as text: a table imports neither torch nor Triton."""
    return tuple(one if one is None or isinstance(one, bool | int | float | str) else str(one) for one in key)


def _distance(wanted: Key, known: Key) -> float:
    """Between two keys, in powers of two; infinite where they differ in more than numbers."""
    if len(wanted) != len(known):
        return math.inf
    return math.fsum(map(_apart, wanted, known))


def _apart(one: Any, other: Any) -> float:
    if _is_number(one) and _is_number(other):
        return abs(_log(one) - _log(other))
    return 0.0 if type(one) is type(other) and one == other else math.inf


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _log(number: float) -> float:
    """A size's power of two; defined for zero and below too."""
    return math.copysign(math.log2(1 + abs(number)), number)


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "Triton interpreter"
