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
from ..tuners import function_name, tuning_key
from .bare import Choice, Row, Signature
from .compare import are_several_ranks, change_of, changed_devices, check_key, configs_of
from .errors import PinError
from .keys import Key, bare_key, distance_of, plain
from .reach import launched_class, own_class
from .registry import compare_ranks, lock, logger, pins, unpinned
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
        self._changed = frozenset[str]()  # devices whose configs were measured with other code
        self._configs: dict[str, dict[Key, Any]] = {}  # device -> key -> config, or row of a bare kernel
        self._signature = None if self._is_tuner else Signature(target)
        self._choices: dict[tuple[Any, ...], Choice | None] = {}  # launch of a bare kernel -> what it takes
        self._devices_used = set[str]()
        self.launching = threading.local()
        """Arguments of the launch, which pruning reads."""
        self._own: Any = None  # what the tuner had tuned
        self._has_logged = self._has_logged_kept = False
        self.launch: Any = self._run_with_config if self._is_tuner else self._run_bare
        """What is called instead of ``run``; None if that looks configs up here."""
        if mode != "off":
            self._compare()

    def report(self) -> dict[str, Any]:
        """Return a row of :func:`pin_report`."""
        name = self.table.kernel or self.name
        source = "" if self._changed == {*self.table.devices} else self.table.source
        return {**super().report(), "kernel": name, "table": source, "unknown": self.mode, "keys": {**self.keys_used}}

    def _compare(self) -> None:
        """Compare the table with the kernel as it is now, and make its configs. Raises PinError."""
        table = self.table
        check_key(self.target, table, self.name)
        self._changed = changed_devices(self.target, table)
        if self._changed == {*table.devices}:
            self._tell_change()
        for device in (device for device in table.devices if device not in self._changed):
            configs, launches = configs_of(self.target, table, device, self.name), table.launches.get(device, {})
            if not self._is_tuner:
                configs = {key: Row(row, launches.get(key, ())) for key, row in table.devices[device].items()}
            self._configs[device] = configs

    def _tell_change(self) -> None:
        """Warn once that the kernel is not the one that was measured. Raises PinError if it may not be tuned now."""
        change = change_of(self.table, self.name)
        if self.mode == "strict" or are_several_ranks():
            raise PinError(change)
        if not self._has_logged:
            self._has_logged = True
            unpinned[self.table.kernel or self.name, "its code is not the code that was measured"] = None
            logger.warning("%s; now it is launched as without a table", change)

    def install(self) -> None:
        """Put this in the place of what the kernel had tuned. Raises PinError."""
        self._kind = launched_class(self.target)
        # A wrapper of an armed kernel's run calls the class's run, which comes here; one of another does not.
        self._wrapper: Any = vars(self.target).get("run") if type(self.target) is self._kind else None
        if self._looks_up:
            self._own, self.target.cache = own_configs(self.target), self
            self.launch = None
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

    @property
    def is_only_looked_up(self) -> bool:
        """True if launches need nothing but this dictionary."""
        return self.launch is None and not self.target.early_config_prune

    def own(self) -> Any:
        """Return the dictionary that the tuner has without a pin."""
        return self._own

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch as without a pin."""
        return self._kind.run(self.target, *args, **kwargs)

    def _run_recorded(self, *args: Any, **kwargs: Any) -> Any:
        """Launch past a ``run`` of the tuner's own, in whose place a recorder waits."""
        record = self._kind.run.fp8tune_records
        return record(lambda _, *args, **kwargs: self._run_with_config(*args, **kwargs))(self.target, *args, **kwargs)

    def _run_wrapper(self, *args: Any, **kwargs: Any) -> Any:
        """Launch by what the program has put in the place of ``run``."""
        if getattr(self.launching, "is_wrapped", False):
            return self._kind.run(self.target, *args, **kwargs)
        self.launching.is_wrapped = True
        try:
            return self._wrapper(*args, **kwargs)
        finally:
            self.launching.is_wrapped = False

    def _launch_wrapped(self, *args: Any, **kwargs: Any) -> Any:
        is_pinned = pins.get(id(self.target)) is self  # else the program has wrapped this again
        return self.launch(*args, **kwargs) if is_pinned else self._wrapper(*args, **kwargs)

    def _run_with_config(self, *args: Any, **kwargs: Any) -> Any:
        """Launch a kernel whose autotuner has a ``run`` of its own with the config of the table."""
        key = tuning_key(self.target, args, kwargs)
        if key not in self:
            return self._run(*args, **kwargs)
        config = self[key]
        arguments = {**dict(zip(self.target.arg_names, args, strict=False)), **kwargs}
        arguments |= self._arguments[located(key) if self._is_split else key]
        if config.pre_hook is not None:
            config.pre_hook(arguments)
        return self.target.fn.run(**arguments)

    def _run_bare(self, *args: Any, **kwargs: Any) -> Any:
        """Launch a bare kernel with the options of the table, and its constants if they were checked."""
        signature = self._signature
        assert signature is not None
        arguments = {**dict(zip(signature.names, args, strict=False)), **kwargs} if args else kwargs
        launch = located(signature.id_of(arguments)) if self._is_split else signature.id_of(arguments)
        if launch not in self._choices or ranks.is_pending:
            self._choices[launch] = self._choice(signature, arguments)
        choice = self._choices[launch]
        if choice is not None:
            bound = {**signature.defaults, **arguments}
            is_checked = choice.config is not None and choice.suits(bound)
            arguments |= choice.config if is_checked and choice.config is not None else choice.options
        return self._kind.run(self.target, **arguments) if self._wrapper is None else self._run(**arguments)

    def _choice(self, signature: Signature, arguments: Mapping[str, Any]) -> Choice | None:
        """Return what a launch of a bare kernel takes from the table; None if it takes nothing. Raises PinError."""
        with lock:
            compare_ranks()
            self._split()
            if (rows := self._rows_here()) is None:
                return None
            key = plain(bare_key(self.table.names, signature.names, arguments))
            known = key if key in rows else self._nearest(key, rows)
            if known is None:
                return None
            row: Row = rows[known]
            choice = row.choice(arguments, signature) if known == key else Choice(row.options)
            constants = ", ".join(row.own_constants(arguments) if choice.config is None else ())
            if constants and self.table.launches and self.mode != "nearest":
                reason = (
                    f"{self.name}: {self.table.source} has no config that was checked with its {constants} for {key}"
                )
                if self.mode == "strict":
                    raise PinError(f"{reason}: run {_tuning_command(self.table.kernel or self.name)}")
                return None
            if constants and not self._has_logged_kept:
                self._has_logged_kept = True
                reason = "no such launch was checked" if self.table.launches else "the table has no identity"
                logger.warning(
                    "%s: launched with the options of %s and its own %s: %s", self.name, known, constants, reason
                )
            self.keys_used[str(key)] = str(known)
            return choice

    def __contains__(self, key: object) -> bool:
        return (dict.__contains__(self, key) and not ranks.is_pending) or self._find(key)

    def _find(self, key: Any) -> bool:
        with lock:
            compare_ranks()
            if not dict.__contains__(self, key):
                if self._split():
                    return key in self
                if (rows := self._rows_here()) is None:
                    return False
                requested = plain(key[:-1] if self._is_split else key)
                known = requested if requested in rows else self._nearest(requested, rows)
                if known is None:
                    return False
                self._arguments[key] = rows[known].all_kwargs()
                dict.__setitem__(self, key, rows[known])
                self.keys_used[str(requested)] = str(known)
            return True

    def _split(self) -> bool:
        """Keep configs by device from now on, if this process has several models. Return True if it did not yet."""
        is_new = not self._is_split and "" not in self.table.devices and _has_several_models()
        if is_new:
            self.__class__ = PinnedByDevice
        return is_new

    def _rows_here(self) -> Mapping[Key, Any] | None:
        """Return the configs of the current device, and log at its first launch how many there are.

        None if they were measured with other code.
        """
        device = "" if "" in self.table.devices else _device_name()
        if device == INTERPRETER and device not in self.table.devices:  # where any config gives the same results
            device = next(iter(self.table.devices), device)
        if device in self._changed:
            self._tell_change()
            return None
        rows = self._configs.get(device, {})
        if device in self._devices_used:
            return rows
        self._devices_used.add(device)
        where = device or "any device"
        where += "" if rows else f" (it has {', '.join(self.table.devices) or 'no device'})"
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
            distances = ((distance_of(key, known), repr(known), known) for known in rows)
            near = (known for distance, _, known in sorted(distances) if distance < math.inf)
            answer = next((known for known in near if self._may_stand_in(rows[known])), None)
            if answer is None:
                reason = f"{line}, nor one with the same dtypes, texts and flags whose config it declares"
                raise PinError(f"{reason}: pin with unknown='tune'")
            effect = f"launched with that of {answer}; other such keys alike"
        if not self._has_logged:  # further keys would repeat it
            self._has_logged = True
            logger.warning("%s: %s", line, effect)
        return answer

    def _may_stand_in(self, config: Any) -> bool:
        """Return True if a config of another key is one that the kernel itself would try for this launch."""
        if isinstance(config, Row):  # of which only the options are taken
            return True
        candidates = [*self.target.configs, *([config] if self.table.insists else [])]
        if self._looks_up and (prune := self.target.early_config_prune):
            candidates = prune(candidates, self.target.nargs, **self.launching.kwargs)
        return config in candidates


class PinnedByDevice(Pinned):
    """Pinned kernel in a process with GPUs of several models: each launch has the config of its device."""

    _is_split = True

    def __contains__(self, key: Any) -> bool:
        here = located(key)
        return (dict.__contains__(self, here) and not ranks.is_pending) or self._find(here)

    def __getitem__(self, key: Key) -> Any:
        return dict.__getitem__(self, located(key))

    def __setitem__(self, key: Key, config: Any) -> None:
        super().__setitem__(located(key), config)


def located(key: Key) -> Key:
    """Return a key with the number of the current device. Called at each launch: written for speed."""
    torch: Any = sys.modules["torch"]
    query = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # without the checks of the latter
    return (*key, query())


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
