"""One pinned kernel: the dictionary and the launch that take the place of its own."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import math
import shlex
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..agreement import ranks
from ..tuners import HookUnknownError, backend_options, decoded, function_name, hook_for, tuning_key
from .errors import PinError, one_line
from .keys import Key, bare_key, distance_of, plain
from .reach import launched_class, own_class
from .registry import compare_ranks, lock, logger, pins
from .tables import Table

INTERPRETER = "Triton interpreter"


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
        self.tuned_s[str(plain(key))] = seconds

    def own(self) -> Any:
        """Return the dictionary that the tuner has without a pin."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Key, Any]:
        """Return the dictionary of a copied tuner, whose own launches are noted from its first on."""
        return copy.deepcopy(dict(self.own()), memo)

    def report(self) -> dict[str, Any]:
        """Return a row of :func:`pin_report`."""
        name = function_name(self._tuner())
        return {"kernel": name, "table": "", "unknown": "tune", "keys": {}, "tuned_s": dict(self.tuned_s)}


class Pinned(TunedConfigs):
    """Stand-in for the autotuner's dictionary: keys that were launched -> configs, which a first launch looks up."""

    _is_split = False  # True if configs are kept for each device

    def __init__(self, target: Any, table: Table, mode: str) -> None:
        super().__init__(target)
        self.keys_used: dict[str, str] = {}  # key of a launch -> key of the table
        self._arguments: dict[Key, dict[str, Any]] = {}  # key of a launch -> arguments of its config
        self.target, self.table, self.name, self.mode = target, table, function_name(target), mode
        self._is_tuner = hasattr(target, "configs")
        if not self._is_tuner and not table.names:
            raise PinError(f"{self.name} has no autotuner: pin a file of fp8tune export --for python, not a dict")
        self._looks_up = self._is_tuner and len(target.configs) > 1 and _runs_as_triton_does(own_class(target))
        self._configs = {device: self._triton_configs(rows) for device, rows in table.devices.items()}
        self._devices_used = set[str]()
        self._launching = threading.local()
        self._own: Any = None  # what the tuner had tuned
        self._has_logged = False
        self.launch: Any = self._run_with_config
        """What is called instead of ``run``; None if that looks configs up here."""

    def report(self) -> dict[str, Any]:
        """Return a row of :func:`pin_report`."""
        name, source = self.table.kernel or self.name, self.table.source
        return {**super().report(), "kernel": name, "table": source, "unknown": self.mode, "keys": {**self.keys_used}}

    def _triton_configs(self, rows: Any) -> dict[Key, Any]:
        source, declared = self.table.source, getattr(self.target, "configs", ())
        make: Any = sys.modules["triton"].Config
        try:
            configs = {plain(key): make(**row) for key, row in rows.items()}
            for config in configs.values():
                config.kwargs = {name: decoded(value) for name, value in config.kwargs.items()}
                config.pre_hook = hook_for(config, declared)
        except HookUnknownError:
            reason = f"{source} has a config that {self.name} does not declare, and its pre_hooks differ"
            raise PinError(reason) from None
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise PinError(f"{source} has a row that cannot be used: {one_line(error)}: export it again") from error
        names = {name for config in configs.values() for name in config.kwargs}
        known = {*self.target.arg_names, *(name for config in declared for name in config.kwargs)}
        if (strange := sorted(names - known)) and (strange := sorted({*strange} - backend_options())):
            raise PinError(f"{source} is of another kernel: {self.name} has no argument {strange[0]!r}")
        return configs

    def install(self) -> None:
        """Put this in the place of what the kernel had tuned. Raises PinError."""
        self._kind = launched_class(self.target)
        # A wrapper of an armed kernel's run calls the class's run, which comes here; one of another does not.
        self._wrapper: Any = vars(self.target).get("run") if type(self.target) is self._kind else None
        if self._looks_up:
            self._own, self.target.cache = own_configs(self.target), self
            self.launch = self._run_noting_arguments if self.target.early_config_prune else None
        elif self._wrapper is not None:
            if self._is_tuner:
                fix = "pin it before that, or by FP8TUNE_PIN"
                raise PinError(f"{self.name} has a run() of its own, which the program has wrapped: {fix}")
            self._run = self._run_wrapper  # type: ignore[method-assign]
            self._outer = self.target.run = functools.partial(self._launch_wrapped)
        if hasattr(self._kind.run, "fp8tune_records") and self._is_tuner and not self._looks_up:
            self.launch = self._run_recorded

    def uninstall(self) -> None:
        """Put back what was there before."""
        if self._looks_up:
            self.target.cache = self._own
        elif self._wrapper is not None and vars(self.target).get("run") is self._outer:
            self.target.run = self._wrapper

    def own(self) -> Any:
        """Return the dictionary that the tuner has without a pin."""
        return self._own

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch as without a pin."""
        return self._kind.run(self.target, *args, **kwargs)

    def _run_noting_arguments(self, *args: Any, **kwargs: Any) -> Any:
        self._launching.kwargs = kwargs  # which pruning reads
        return self._run(*args, **kwargs)

    def _run_recorded(self, *args: Any, **kwargs: Any) -> Any:
        """Launch past a ``run`` of the tuner's own, in whose place a recorder waits."""
        record = self._kind.run.fp8tune_records
        return record(lambda _, *args, **kwargs: self._run_with_config(*args, **kwargs))(self.target, *args, **kwargs)

    def _run_wrapper(self, *args: Any, **kwargs: Any) -> Any:
        """Launch by what the program has put in the place of ``run``."""
        if getattr(self._launching, "is_wrapped", False):
            return self._kind.run(self.target, *args, **kwargs)
        self._launching.is_wrapped = True
        try:
            return self._wrapper(*args, **kwargs)
        finally:
            self._launching.is_wrapped = False

    def _launch_wrapped(self, *args: Any, **kwargs: Any) -> Any:
        is_pinned = pins.get(id(self.target)) is self  # else the program has wrapped this again
        return self._run_with_config(*args, **kwargs) if is_pinned else self._wrapper(*args, **kwargs)

    def _run_with_config(self, *args: Any, **kwargs: Any) -> Any:
        """Launch a bare kernel, or one whose autotuner has a ``run`` of its own, with the config of the table."""
        arguments = {**dict(zip(self.target.arg_names, args, strict=False)), **kwargs} if args else kwargs
        if self._is_tuner:
            key = tuning_key(self.target, args, kwargs)
        else:
            key = bare_key(self.table.names, self.target.arg_names, arguments)
        if key not in self:
            return self._run(*args, **kwargs)
        config = self[key]
        arguments |= self._arguments[located(key) if self._is_split else key]
        if config.pre_hook is not None:
            config.pre_hook(arguments)
        if self._is_tuner:
            return self.target.fn.run(**arguments)
        return self._kind.run(self.target, **arguments) if self._wrapper is None else self._run(**arguments)

    def __contains__(self, key: object) -> bool:
        return (dict.__contains__(self, key) and not ranks.is_pending) or self._find(key)

    def _find(self, key: Any) -> bool:
        with lock:
            compare_ranks()
            if not dict.__contains__(self, key):
                if not self._is_split and "" not in self._configs and _has_several_models():
                    self.__class__ = PinnedByDevice
                    return key in self
                rows, requested = self._rows_here(), plain(key[:-1] if self._is_split else key)
                known = requested if requested in rows else self._nearest(requested, rows)
                if known is None:
                    return False
                self._arguments[key] = rows[known].all_kwargs()
                dict.__setitem__(self, key, rows[known])
                self.keys_used[str(requested)] = str(known)
            return True

    def _rows_here(self) -> Mapping[Key, Any]:
        """Return the configs of the current device, and log at its first launch how many there are."""
        device = "" if "" in self._configs else _device_name()
        if device == INTERPRETER and device not in self._configs:  # where any config gives the same results
            device = next(iter(self._configs), device)
        rows = self._configs.get(device, {})
        if device in self._devices_used:
            return rows
        self._devices_used.add(device)
        where = device or "any device"
        where += "" if rows else f" (it has {', '.join(self._configs) or 'no device'})"
        keys = "1 key" if len(rows) == 1 else f"{len(rows)} keys"
        line = f"{keys} for {where}; unknown keys: {self.mode}"
        logger.warning("%s is pinned to %s: %s", self.name, self.table.source, line)
        return rows

    def _nearest(self, key: Key, rows: Mapping[Key, Any]) -> Key | None:
        """Return the key of the table that stands for an unknown one; None if Triton tunes it. Raises PinError."""
        line = f"{self.name}: {self.table.source} has no config for the key {key!s:.100}"
        if self.mode == "strict":
            raise PinError(f"{line}: run {_tuning_command(self.table.kernel or self.name)}")
        answer, effect = None, "Triton tunes it, and any other such key"
        if self.mode == "nearest":
            prune = self.target.early_config_prune if self._looks_up else None
            distances = ((distance_of(key, known), repr(known), known) for known in rows)
            for _, _, known in sorted(item for item in distances if item[0] < math.inf):
                config = rows[known]
                if not prune or config in prune([config], self.target.nargs, **self._launching.kwargs):
                    answer, effect = known, f"launched with that of {known}; other such keys alike"
                    break
            else:
                raise PinError(f"{line}, nor one with the same dtypes, texts and flags: pin with unknown='tune'")
        if not self._has_logged:  # further keys would repeat it
            self._has_logged = True
            logger.warning("%s: %s", line, effect)
        return answer


class PinnedByDevice(Pinned):
    """The same in a process with GPUs of several models: each launch has the config of its device."""

    _is_split = True

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(located(key))

    def __getitem__(self, key: Key) -> Any:
        return super().__getitem__(located(key))

    def __setitem__(self, key: Key, config: Any) -> None:
        super().__setitem__(located(key), config)


def located(key: Key) -> Key:
    """Return a key with the name of the current device."""
    return (*key, _name_of(sys.modules["torch"].cuda.current_device()))


@functools.cache
def _name_of(device: int) -> str:
    return str(sys.modules["torch"].cuda.get_device_name(device))


def own_configs(tuner: Any) -> Any:
    """Return the dictionary of configs that a tuner has without a pin; a copy may have that of a pinned one."""
    return tuner.cache.own() if isinstance(tuner.cache, TunedConfigs) else tuner.cache


def _runs_as_triton_does(kind: Any) -> bool:
    """Return False for a subclass that launches by itself and may never look into ``cache``."""
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    return _calls(inspect.unwrap(kind.run), inspect.unwrap(autotuner.run), kind)


def _calls(run: Any, original: Any, kind: Any, depth: int = 4) -> bool:
    """Return True if ``run`` is the original or calls it, as ``super().run`` or by the name of another function."""
    code = getattr(run, "__code__", None)
    if run is original or code is None or not depth:
        return run is original
    cells = {name: cell.cell_contents for name, cell in zip(code.co_freevars, run.__closure__ or (), strict=True)}
    inside = [*cells.values(), *(run.__defaults__ or ()), *(run.__globals__.get(name) for name in code.co_names)]
    if {"super", "run"} <= {*code.co_names} and "__class__" in cells:
        inside.append(super(cells["__class__"], kind).run)
    functions = (inspect.unwrap(item) for item in inside if inspect.isfunction(item))
    return any(_calls(item, original, kind, depth - 1) for item in functions)


def _tuning_command(name: str) -> str:
    """Return the command that tunes a kernel in this program."""
    program = shlex.join([Path(sys.executable or "python").name, *sys.orig_argv[1:]])
    program = program if len(program) < 80 else f"{program[:77]}..."
    return f"fp8tune tune --kernel {shlex.quote(name)} -- {program}"


def _device_name() -> str:
    cuda = sys.modules["torch"].cuda
    return str(cuda.get_device_name()) if cuda.is_available() else INTERPRETER


def _has_several_models() -> bool:
    """Return True if this process sees devices with different names."""
    cuda = sys.modules["torch"].cuda
    count = cuda.device_count() if cuda.is_available() else 0
    return count > 1 and len({cuda.get_device_name(index) for index in range(count)}) > 1
