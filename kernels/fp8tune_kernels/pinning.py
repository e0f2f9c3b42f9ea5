"""Make kernels take their configs from a table at run time: they are not timed, so every rank launches the same.

Triton's own autotuner still makes the key and launches; only the dictionary in which it looks configs up is another.
``torch.compile`` tunes by itself and reads no such dictionary. Kernels that do not exist yet are pinned at their first
launch: constructors of Triton's classes are wrapped, so it does not matter which module makes them, or when.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import math
import os
import runpy
import shlex
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .agreement import Facts, code_hash, hashed, ranks, versions
from .tuners import (
    HookUnknownError,
    chain,
    decoded,
    flattened,
    function_name,
    hook_for,
    is_kernel,
    is_tensor,
    python_function,
    resolved,
    tensor_in,
    tuner_of,
    tuning_key,
)

MODES = ("off", "strict", "nearest", "tune")

VARIABLE = "FP8TUNE_PIN"
"""Environment variable: ``path[:mode]`` pins a table in every process; a mode alone replaces that of every ``pin``."""

INTERPRETER = "Triton interpreter"
_SCALARS = frozenset({int, bool, float, str, type(None)})
_text = functools.cache(str)

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

    ``kernel``: a ``triton.autotune`` kernel, ``triton.heuristics`` around it or not, or a bare ``triton.jit`` kernel,
    whose callers' configs are replaced. Without it, all kernels that the files name are pinned: now, or at their first
    launch if their modules are imported later.

    ``unknown`` says what happens for keys that the table lacks:

    - ``nearest``: the config of the key with equal dtypes, texts and flags whose numbers are nearest on a log scale;
      of configs that the kernel's ``early_config_prune`` refuses for the launch, none. The same on every rank. Raises
      PinError where no such key exists.
    - ``strict``: the launch raises PinError with the key and the command that tunes it.
    - ``tune``: Triton tunes the key, so ranks may disagree on it.
    - ``off``: the table is not used at all; Triton tunes every key.

    ``FP8TUNE_PIN=path[:mode]`` in the environment does the same without a line of code, and the kernels of its table
    stay as it pins them. ``FP8TUNE_PIN=mode`` replaces ``unknown``.

    Once ``torch.distributed`` is initialized, ranks compare tables, code and versions, once: PinError names what
    differs. The first launch logs one line (logger ``fp8tune``) with table and keys. So does the first key that is
    unknown. A later ``pin`` of a kernel replaces this one; :func:`unpin` ends it. Raises PinError for a table or kernel
    that cannot be used; then no kernel is pinned.
    """
    variable = os.environ.get(VARIABLE, "")
    mode = variable if variable in MODES else unknown
    if mode not in MODES:
        raise PinError(f"unknown={mode!r}: choose one of {', '.join(MODES)}")
    tables = tables_of(table)
    if kernel is None:
        _pin_all([item for item in tables if item.kernel not in _environment], mode)
    else:  # of a table alone the kernel may have moved to another module since
        matching = [item for item in tables if is_of(kernel, item)] or (tables if len(tables) == 1 else [])
        if not matching:
            raise PinError(f"no table in {str(table)!r} is of {function_name(_target(kernel))}: export one for it")
        if not any(is_of(kernel, item) for item in _environment.values()):
            _install([_Pinned(_target(kernel), matching[0], mode)])
    _compare_ranks()


def pin_from_environment() -> None:
    """Pin the table that ``FP8TUNE_PIN`` names, if it names any and has not been pinned. Raises PinError."""
    variable = os.environ.get(VARIABLE, "")
    if not variable or variable in MODES or _environment:
        return
    path, _, mode = variable.rpartition(":")
    if not path or mode not in MODES:
        path, mode = variable, "nearest"
    if not Path(path).exists():
        modes = ", ".join(MODES)
        raise PinError(f"{VARIABLE}={variable!r:.150}: no such file or folder; give PATH or PATH:MODE, MODE of {modes}")
    tables = tables_of(path)
    _pin_all(tables, mode, may_lack_modules=True)
    _environment.update((item.kernel, item) for item in tables)


def pin_to(kernel: Any, table: Table, unknown: str) -> None:
    """Pin one kernel to one table of :func:`tables_of`, whatever the environment says."""
    _install([_Pinned(_target(kernel), table, unknown)])


def _pin_all(tables: list[Table], mode: str, *, may_lack_modules: bool = False) -> None:
    """Pin the kernels of tables; those that do not exist yet at their first launch."""
    kernels = [_kernel_named(item, may_lack_modules) for item in tables]
    _install([_Pinned(_target(kernel), item, mode) for kernel, item in zip(kernels, tables, strict=True) if kernel])
    _waiting.update((item.kernel, (item, mode)) for kernel, item in zip(kernels, tables, strict=True) if not kernel)
    if _waiting:
        watch()


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
    if kernel is None:
        _waiting.clear()


def watch() -> None:
    """Note the run-time tuning of kernels made from now on, and pin those that tables name at their first launch."""
    runtime = importlib.import_module("triton.runtime.autotuner")  # all of Triton may not be imported yet
    kinds = [runtime.Autotuner, runtime.JITFunction]
    if interpreter := sys.modules.get("triton.runtime.interpreter"):  # Triton's own functions load it where it is used
        kinds.append(interpreter.InterpretedFunction)
    for kind in kinds:
        if not hasattr(kind.__init__, "fp8tune_watches"):
            kind.__init__ = _watched(kind.__init__)


def _watched(initialize: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(initialize)
    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if hasattr(self, "configs"):
            self.cache = TunedConfigs(self, self.cache)
            _tuners.add(self)
        if _waiting:
            self.run = functools.partial(_first_launch, self)

    watched.fp8tune_watches = True  # type: ignore[attr-defined]
    return watched


def _first_launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Pin a kernel if a table names it, and launch it. What it wraps is launched by it, and not pinned on its own."""
    with _lock:
        for item in chain(kernel):
            if getattr(vars(item).get("run"), "func", None) is _first_launch:
                del item.run
        if id(kernel) not in _pins:  # another thread's first launch, or an explicit pin
            matching = (entry for entry in list(_waiting.values()) if is_of(kernel, entry[0]))
            _install([_Pinned(kernel, *entry) for entry in matching])
    return kernel.run(*args, **kwargs)


def pin_report() -> dict[str, Any]:
    """Return what kernels of this process took their configs from, for ``json.dumps``.

    ``kernels``: those that are pinned, and those that tuned at run time, with ``keys`` (key -> key of the table) and
    ``tuned_s`` (key -> seconds of its run-time tuning); ``waiting``: those in tables that have not been launched.
    Kernels made before the first ``pin`` of a table whose modules were not imported are only in it if they are pinned.
    """
    pinned = [item.report() for item in list(_pins.values())]
    tuners = [item for item in list(_tuners) if id(item) not in _pins]
    unpinned = [item.cache.report() for item in tuners if isinstance(item.cache, TunedConfigs) and item.cache.tuned_s]
    waiting = sorted(_waiting.keys() - {item["kernel"] for item in pinned})
    return {"kernels": sorted(pinned + unpinned, key=lambda item: str(item["kernel"])), "waiting": waiting}


def keys_of(kernel: Any) -> dict[str, Any]:
    """Return the entry of an autotuner or bare kernel in :func:`pin_report`; empty for one that is not watched."""
    configs = _pins.get(id(kernel)) or getattr(kernel, "cache", None)
    return configs.report() if isinstance(configs, TunedConfigs) else {}


def _compare_ranks() -> None:
    """Raise PinError if ranks differ in what they pin. Asks them once."""
    if difference := ranks.compare(_facts):
        fix = "install the same and pin the same tables on all ranks"
        raise PinError(f"{difference[:220]}: {fix}")


def _facts() -> Facts:
    """Return what ranks have to agree on."""
    entries = {id(table): (table, mode, None) for table, mode in _waiting.values()}
    entries |= {id(item.table): (item.table, item.mode, item.target) for item in _pins.values()}
    facts = dict(versions())
    for table, mode, target in entries.values():
        name = table.kernel or function_name(target)
        rows = [(device, sorted(map(repr, keys.items()))) for device, keys in sorted(table.devices.items())]
        facts[f"table of {name}"] = hashed(repr(rows))
        facts[f"unknown keys of {name}"] = mode
        place = table.kernel.rpartition(":")[0] or python_function(target).__code__.co_filename
        facts[f"code of {place}"] = code_hash(place)
    return facts


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
        if names.get("HAS_OWN_INPUTS"):
            name = names["KERNEL"]
            fix = "call config_for of the file before you make them"
            raise PinError(f"{name} of {path} cannot be pinned, its inputs depend on the config: {fix}")
        return Table(str(path), dict(names["TABLE"]), names["KERNEL"], tuple(names.get("KEY", ())))
    except PinError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"{path} is no table that can be read: {_one_line(error)}"
        raise PinError(f"{reason}: write one with fp8tune export --for python") from error


def _kernel_named(table: Table, may_lack_modules: bool = False) -> Any:
    """Return the kernel of a table; None if its module has not been imported, or is being imported."""
    if not table.kernel:
        raise PinError("a dict names no kernel: pass the kernel behind it")
    where, _, attribute = table.kernel.rpartition(":")
    module = _loaded(where)
    if module is None and (may_lack_modules or _exists(where)):
        return None
    try:
        if module is None:
            raise ModuleNotFoundError(f"no module {where!r}")
        return resolved(module, attribute)
    except (ImportError, AttributeError, LookupError, TypeError) as error:
        if module is not None and (
            may_lack_modules or getattr(getattr(module, "__spec__", None), "_initializing", False)
        ):
            return None
        reason = f"{table.source} is of {table.kernel}, which cannot be imported: {_one_line(error, 100)}"
        raise PinError(f"{reason}: import its module first, or pass the kernel behind the table") from None


def _exists(where: str) -> bool:
    """Return True if there is such a file, or such a package at the top: those below are not looked for."""
    try:
        return Path(where).is_file() if where.endswith(".py") else bool(importlib.util.find_spec(where.split(".")[0]))
    except ValueError:  # a module without a spec
        return False


def _loaded(where: str) -> Any:
    """Return a module of this program by its name, or by its file ``path.py``."""
    main = sys.modules["__main__"]
    if not where.endswith(".py"):  # a program of `python -m` is not imported by its name
        return main if getattr(getattr(main, "__spec__", None), "name", "") == where else sys.modules.get(where)
    path = Path(where).absolute()
    files = ((item, getattr(item, "__file__", None)) for item in list(sys.modules.values()))
    return next((item for item, file in files if file and Path(file).absolute() == path), None)


def is_of(kernel: Any, table: Table) -> bool:
    """Return True if the table names the kernel; the attribute may be called otherwise than its function."""
    target = _target(kernel)
    where, _, attribute = table.kernel.rpartition(":")
    try:
        return _target(resolved(_loaded(where), attribute)) is target
    except (AttributeError, LookupError, PinError):
        return table.kernel == function_name(target)


class TunedConfigs(dict[Key, Any]):
    """An autotuner's dictionary of keys and configs, which notes the keys that are tuned at run time."""

    def __init__(self, tuner: Any, configs: Mapping[Key, Any] = MappingProxyType({})) -> None:
        super().__init__(configs)
        self.tuned_s: dict[str, float] = {}
        """Key -> seconds of its run-time tuning."""
        self._tuner = weakref.ref(tuner)
        self._bench_s = getattr(tuner, "bench_time", None)

    def __setitem__(self, key: Key, config: Any) -> None:
        super().__setitem__(key, config)
        bench_s = getattr(self._tuner(), "bench_time", None)
        if bench_s != self._bench_s:  # else it was read from a file
            self._bench_s = bench_s
            self.note(key, bench_s or 0.0)

    def note(self, key: Key, seconds: float) -> None:
        """Note that a key was tuned at run time."""
        self.tuned_s[str(_plain(key))] = seconds

    def report(self) -> dict[str, Any]:
        """Return a row of :func:`pin_report`."""
        name = function_name(self._tuner())
        return {"kernel": name, "table": "", "unknown": "tune", "keys": {}, "tuned_s": dict(self.tuned_s)}


class _Pinned(TunedConfigs):
    """Stand-in for the autotuner's dictionary: keys that were launched -> configs, which a first launch looks up."""

    def __init__(self, target: Any, table: Table, mode: str) -> None:
        super().__init__(target)
        self.keys_used: dict[str, str] = {}  # key of a launch -> key of the table
        self._arguments: dict[Key, dict[str, Any]] = {}  # key of a launch -> arguments of its config
        self.target, self.table, self.name, self.mode = target, table, function_name(target), mode
        self._is_tuner = hasattr(target, "configs")
        if not self._is_tuner and not table.names:
            raise PinError(f"{self.name} has no autotuner: pin a file of fp8tune export --for python, not a dict")
        self._looks_up = self._is_tuner and len(target.configs) > 1 and _runs_as_triton_does(type(target))
        self._configs = {device: self._triton_configs(rows) for device, rows in table.devices.items()}
        self._launching = threading.local()
        self._has_logged = False

    def report(self) -> dict[str, Any]:
        """Return a row of :func:`pin_report`."""
        name, source = self.table.kernel or self.name, self.table.source
        return {**super().report(), "kernel": name, "table": source, "unknown": self.mode, "keys": {**self.keys_used}}

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
        arguments = {**dict(zip(self.target.arg_names, args, strict=False)), **kwargs} if args else kwargs
        key = tuning_key(self.target, args, kwargs) if self._is_tuner else self._bare_key(arguments)
        if key not in self:
            return self._run(*args, **kwargs)
        config = self[key]
        arguments |= self._arguments[key]
        if config.pre_hook is not None:
            config.pre_hook(arguments)
        return (self.target.fn.run if self._is_tuner else self._run)(**arguments)

    def _bare_key(self, arguments: Mapping[str, Any]) -> Key:
        key = [arguments[name] for name in self.table.names if name in arguments]
        for name in self.target.arg_names:  # at each launch
            value: Any = arguments.get(name)
            if type(value) in _SCALARS:
                continue
            if is_tensor(value):
                key.append(_text(value.dtype))
            else:
                memory = (tensor_in(item) for _, item in flattened(name, value))
                key += [_text(tensor.dtype) for tensor in memory if tensor is not None]
        return tuple(key)

    def __contains__(self, key: object) -> bool:
        return (dict.__contains__(self, key) and not ranks.is_pending) or self._find(key)

    def _find(self, key: Any) -> bool:
        with _lock:
            _compare_ranks()
            if not dict.__contains__(self, key):
                plain = _plain(key)
                known = plain if plain in self._rows else self._nearest(plain)
                if known is None:
                    return False
                self._arguments[key] = self._rows[known].all_kwargs()
                dict.__setitem__(self, key, self._rows[known])
                self.keys_used[str(plain)] = str(known)
            return True

    @functools.cached_property
    def _rows(self) -> Mapping[Key, Any]:
        """Configs of the device that launches first."""
        device = "" if "" in self._configs else _device_name()
        if device == INTERPRETER and device not in self._configs:  # where any config gives the same results
            device = next(iter(self._configs), device)
        rows = self._configs.get(device, {})
        where = device or "any device"
        where += "" if rows else f" (it has {', '.join(self._configs) or 'no device'})"
        keys = "1 key" if len(rows) == 1 else f"{len(rows)} keys"
        line = f"{keys} for {where}; unknown keys: {self.mode}"
        _logger.warning("%s is pinned to %s: %s", self.name, self.table.source, line)
        return rows

    def _nearest(self, key: Key) -> Key | None:
        """Return the key of the table that stands for an unknown one; None if Triton tunes it. Raises PinError."""
        line = f"{self.name}: {self.table.source} has no config for the key {key!s:.100}"
        if self.mode == "strict":
            raise PinError(f"{line}: run {_tuning_command(self.table.kernel or self.name)}")
        answer, effect = None, "Triton tunes it, and any other such key"
        if self.mode == "nearest":
            prune = self.target.early_config_prune if self._looks_up else None
            distances = ((_distance(key, known), repr(known), known) for known in self._rows)
            for _, _, known in sorted(item for item in distances if item[0] < math.inf):
                config = self._rows[known]
                if not prune or config in prune([config], self.target.nargs, **self._launching.kwargs):
                    answer, effect = known, f"launched with that of {known}; other such keys alike"
                    break
            else:
                raise PinError(f"{line}, nor one with the same dtypes, texts and flags: pin with unknown='tune'")
        if not self._has_logged:  # further keys would repeat it
            self._has_logged = True
            _logger.warning("%s: %s", line, effect)
        return answer


_pins: dict[int, _Pinned] = {}
"""id of an autotuner or bare kernel -> its table."""
_waiting: dict[str, tuple[Table, str]] = {}
"""Name of a kernel that did not exist when it was pinned -> its table, and the mode for unknown keys."""
_environment: dict[str, Table] = {}
"""Name of a kernel -> the table that the environment pins it to."""
_tuners: weakref.WeakSet[Any] = weakref.WeakSet()
"""Autotuners whose run-time tuning is noted."""


def _runs_as_triton_does(kind: type) -> bool:
    """Return False for a subclass that launches by itself and may never look into ``cache``."""
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    return inspect.unwrap(kind.run) is inspect.unwrap(autotuner.run)  # type: ignore[attr-defined]


def _tuning_command(name: str) -> str:
    """Return the command that tunes a kernel in this program."""
    program = shlex.join([Path(sys.executable or "python").name, *sys.orig_argv[1:]])
    program = program if len(program) < 80 else f"{program[:77]}..."
    return f"fp8tune tune --kernel {shlex.quote(name)} -- {program}"


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
    return str(cuda.get_device_name()) if cuda.is_available() else INTERPRETER


def _one_line(error: BaseException, longest: int = 300) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()) or type(error).__name__}"[:longest]
