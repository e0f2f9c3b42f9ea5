"""One pinned kernel: the dictionary and the launch that take the place of its own."""

from __future__ import annotations

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
from ..tuners import HookUnknownError, decoded, function_name, hook_for, tuning_key
from .errors import PinError, one_line
from .keys import Key, bare_key, distance_of, plain
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

    def report(self) -> dict[str, Any]:
        """Return a row of :func:`pin_report`."""
        name = function_name(self._tuner())
        return {"kernel": name, "table": "", "unknown": "tune", "keys": {}, "tuned_s": dict(self.tuned_s)}


class Pinned(TunedConfigs):
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
        pins[id(self.target)] = self

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
        if self._is_tuner:
            key = tuning_key(self.target, args, kwargs)
        else:
            key = bare_key(self.table.names, self.target.arg_names, arguments)
        if key not in self:
            return self._run(*args, **kwargs)
        config = self[key]
        arguments |= self._arguments[key]
        if config.pre_hook is not None:
            config.pre_hook(arguments)
        return (self.target.fn.run if self._is_tuner else self._run)(**arguments)

    def __contains__(self, key: object) -> bool:
        return (dict.__contains__(self, key) and not ranks.is_pending) or self._find(key)

    def _find(self, key: Any) -> bool:
        with lock:
            compare_ranks()
            if not dict.__contains__(self, key):
                requested = plain(key)
                known = requested if requested in self._rows else self._nearest(requested)
                if known is None:
                    return False
                self._arguments[key] = self._rows[known].all_kwargs()
                dict.__setitem__(self, key, self._rows[known])
                self.keys_used[str(requested)] = str(known)
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
        logger.warning("%s is pinned to %s: %s", self.name, self.table.source, line)
        return rows

    def _nearest(self, key: Key) -> Key | None:
        """Return the key of the table that stands for an unknown one; None if Triton tunes it. Raises PinError."""
        line = f"{self.name}: {self.table.source} has no config for the key {key!s:.100}"
        if self.mode == "strict":
            raise PinError(f"{line}: run {_tuning_command(self.table.kernel or self.name)}")
        answer, effect = None, "Triton tunes it, and any other such key"
        if self.mode == "nearest":
            prune = self.target.early_config_prune if self._looks_up else None
            distances = ((distance_of(key, known), repr(known), known) for known in self._rows)
            for _, _, known in sorted(item for item in distances if item[0] < math.inf):
                config = self._rows[known]
                if not prune or config in prune([config], self.target.nargs, **self._launching.kwargs):
                    answer, effect = known, f"launched with that of {known}; other such keys alike"
                    break
            else:
                raise PinError(f"{line}, nor one with the same dtypes, texts and flags: pin with unknown='tune'")
        if not self._has_logged:  # further keys would repeat it
            self._has_logged = True
            logger.warning("%s: %s", line, effect)
        return answer


def _runs_as_triton_does(kind: type) -> bool:
    """Return False for a subclass that launches by itself and may never look into ``cache``."""
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    return inspect.unwrap(kind.run) is inspect.unwrap(autotuner.run)  # type: ignore[attr-defined]


def _tuning_command(name: str) -> str:
    """Return the command that tunes a kernel in this program."""
    program = shlex.join([Path(sys.executable or "python").name, *sys.orig_argv[1:]])
    program = program if len(program) < 80 else f"{program[:77]}..."
    return f"fp8tune tune --kernel {shlex.quote(name)} -- {program}"


def _device_name() -> str:
    cuda = sys.modules["torch"].cuda
    return str(cuda.get_device_name()) if cuda.is_available() else INTERPRETER


def install_all(new: list[Pinned]) -> None:
    """Install pins in the place of earlier ones; one whose mode is ``off`` only ends those."""
    for pinned in new:
        uninstall(pinned.target)
        if pinned.mode == "off":
            logger.warning("%s is not pinned to %s: off", pinned.name, pinned.table.source)
        else:
            pinned.install()


def uninstall(target: Any) -> None:
    """End the pin of an autotuner or bare kernel, if it has one."""
    if (pinned := pins.pop(id(target), None)) is not None:
        pinned.uninstall()
