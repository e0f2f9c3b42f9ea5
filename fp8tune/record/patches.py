"""What is put before Triton's own functions in a recorded process. Each launch goes on, whatever the recorder does."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fp8tune.autotuned.encoding import chain
from fp8tune.record import process
from fp8tune.record.launched import DECLARED, Launched, tuning_key

CALM = 4096
"""After so many launches of a kernel without a new kind only some are looked at, and counts are estimates. Looking at
all of them took 13.2 +- 2.6 us a launch on an H200 (torch 2.11, Triton 3.6): 11 % of a 24 ms step of 200 launches."""
STRIDES = (5, 11, 3, 8, 13, 2, 7)
"""Launches that pass between two looks, in turn: no step repeats itself in that rhythm. 7 in the mean."""

_tuning = threading.local()
"""Of this thread: whether an autotuner's launch is going on."""


def patch_autotuner(module: ModuleType) -> None:
    """``Autotuner.run`` of a module that was just imported, and ``JITFunction.run`` if bare kernels are wanted."""
    current = process.current()
    autotuner = module.Autotuner
    autotuner.__init__ = _noting_configs(autotuner.__init__)
    run = _tuned_without_a_gpu(autotuner.run)
    if current.patterns:
        run = _seen_from_inside(run)
        jitted = module.JITFunction
        jitted.run = _outside(recorded_run(jitted.run, current, _bare(current)), jitted.run)
    autotuner.run = recorded_run(run, current, current.of)


def patch_interpreter(module: ModuleType) -> None:
    """``InterpretedFunction.run``, if bare kernels are wanted."""
    current = process.current()
    if current.patterns:
        interpreted = module.InterpretedFunction
        interpreted.run = _outside(recorded_run(interpreted.run, current, _bare(current)), interpreted.run)


def patch_torch_compile(module: ModuleType) -> None:
    """The table of kernels that torch.compile launches copies of."""
    table = module.KernelSideTable
    add = table.add_kernel

    @functools.wraps(add)
    def noted(self: Any, kernel: Any) -> Any:
        try:
            for one in chain(kernel):
                if type(one).__name__ == "Autotuner" or any(base.__name__ == "Autotuner" for base in type(one).__mro__):
                    process.current().of(one).by_torch_compile = True
        except Exception as error:
            _say_once(f"a kernel of torch.compile is not named: {error!r}")
        return add(self, kernel)

    table.add_kernel = noted


def recorded_run(original: Callable[..., Any], current: process.Process, of: Callable[[Any], Launched | None]) -> Any:
    """``run`` of a kernel, recorded. What happens at each launch is written for speed."""
    launched_by_id = current.launched

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            launched = launched_by_id[id(self)]
            is_counted = launched.unseen > 0
            if is_counted:
                launched.unseen -= 1
            else:
                signature = launched.signatures.of(args, kwargs)
                entry = launched.last.following
                if entry.signature != signature:
                    entry = launched.last.following = launched.entries[signature]
                launched.last = entry
                count = entry.count + launched.weight
                is_counted = count < entry.due
                if is_counted:
                    entry.count = count
                    launched.calm += 1
                    if launched.calm > CALM:
                        launched.unseen = STRIDES[launched.calm % len(STRIDES)]
                        launched.weight = launched.unseen + 1
        except Exception:
            is_counted = False
        if is_counted:
            return original(self, *args, **kwargs)
        try:
            found = of(self)
        except Exception as error:
            _say_once(f"a kernel is not recorded: {error!r}")
            found = None
        launch = functools.partial(original, self)
        return launch(*args, **kwargs) if found is None else found.run(launch, args, kwargs)

    return run


def _bare(current: process.Process) -> Callable[[Any], Launched | None]:
    """What is launched through a bare kernel that a pattern names; None for others."""

    def of(kernel: Any) -> Launched | None:
        if id(kernel) in current.others:
            return None
        if id(kernel) not in current.launched and not current.wants(kernel):
            current.others.add(id(kernel))
            return None
        return current.of(kernel, False)

    return of


def _outside(recorded: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """``recorded``, but ``original`` for what an autotuner launches, which is recorded as the autotuner's."""

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (original if getattr(_tuning, "depth", 0) else recorded)(self, *args, **kwargs)

    return run


def _seen_from_inside(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        _tuning.depth = getattr(_tuning, "depth", 0) + 1
        try:
            return original(self, *args, **kwargs)
        finally:
            _tuning.depth -= 1

    return run


def _noting_configs(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        DECLARED[self] = tuple(self.configs)

    return init


def _tuned_without_a_gpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """On Triton's interpreter nothing can be timed: an unknown key takes the first config, which is said once."""
    from triton import knobs

    if not knobs.runtime.interpret:
        return original

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_timed = len(self.configs) > 1 and not kwargs.get("warmup") and self._do_bench is None
        if is_timed and not _has_driver() and (key := tuning_key(self, args, kwargs)) not in self.cache:
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            self.cache[key] = self.prune_configs(kwargs)[0]
            _say_once("no GPU here: nothing is tuned at run time, and each kernel takes its first config")
        return original(self, *args, **kwargs)

    return run


@functools.cache
def _has_driver() -> bool:
    from triton.runtime.driver import driver

    try:
        return driver.active is not None
    except Exception:
        return False


@functools.cache
def _say_once(text: str) -> None:
    print(f"fp8tune record: {text}", file=sys.stderr)
