"""Wrap Triton's own functions in a recorded process. Each launch goes on, whatever the recorder does."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fp8tune.replay.naming import attribute_of
from fp8tune.replay.watch import process, window
from fp8tune.replay.watch.kernel import DECLARED, signature_of
from fp8tune_kernels import pinning
from fp8tune_kernels.tuners import chain, resolved, tuner_of, tuning_key

CALM = 4096
"""After so many launches of a kernel without a new kind only some are looked at, and counts are estimates. Looking at
all of them took 13.2 +- 2.6 us a launch on an H200 (torch 2.11, Triton 3.6): 11 % of a 24 ms step of 200 launches."""
STRIDES = (10, 22, 6, 17, 27, 3, 14)
"""Launches that pass between two looks, in turn: no step repeats itself in that rhythm. 14 in the mean."""

_tuning = threading.local()  # depth of the autotuners' launches that are going on in a thread


def patch_autotuner(module: ModuleType) -> None:
    """Wrap ``Autotuner.run`` of a module that was just imported, and ``JITFunction.run`` if bare kernels count."""
    current, autotuner = process.current(), module.Autotuner
    pinning.watch()
    mark = _marked_as_tuning if current.patterns else lambda run: run
    patch_bare(module)
    autotuner.run = recorded_run(mark(_tuned_without_a_gpu(autotuner.run)), autotuner, current)
    initialize = autotuner.__init__

    @functools.wraps(initialize)
    def noting_configs(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        DECLARED[self] = tuple(self.configs)
        kind = type(self)
        if "fp8tune_original" not in vars(vars(kind).get("run", object)):  # it may launch without the class above
            kind.run = recorded_run(mark(getattr(kind.run, "fp8tune_original", kind.run)), kind, current)

    autotuner.__init__ = noting_configs


def patch_bare(module: ModuleType) -> None:
    """Wrap ``run`` of JITFunction or InterpretedFunction, if bare kernels count; not for what an autotuner launches."""
    names = [name for name in ("JITFunction", "InterpretedFunction") if name in vars(module)]
    if not names or not process.current().patterns:
        return
    jitted = vars(module)[names[0]]
    original, recorded = jitted.run, recorded_run(jitted.run, jitted, process.current())

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (original if getattr(_tuning, "depth", 0) else recorded)(self, *args, **kwargs)

    jitted.run = run


def patch_torch_compile(module: ModuleType) -> None:
    """Record the launches that torch.compile traces: it makes them later, with copies of the kernels."""
    wrapper = module.TritonKernelWrapperMutation
    original = wrapper.__call__

    @functools.wraps(original)
    def call(self: Any, **arguments: Any) -> Any:
        try:
            _add_trace(module.kernel_side_table, **arguments)
        except Exception as error:
            _say_once(f"a kernel that torch.compile launches is not recorded: {error!r}")
        return original(self, **arguments)

    wrapper.__call__ = call


def _add_trace(
    table: Any, kernel_idx: int, constant_args_idx: int, grid: Any, tma_descriptor_metadata: Any, kwargs: Any
) -> None:
    bound, kernel = {**table.get_constant_args(constant_args_idx), **kwargs}, table.get_kernel(kernel_idx)
    if not any(type(value).__name__ in ("FakeTensor", "FunctionalTensor") for value in bound.values()):
        return  # a launch of the kernel itself
    # torch.compile may have made a tuner of its own around the same function
    name = attribute_of(kernel) or attribute_of(list(chain(kernel))[1])
    module, _, attribute = (name or ":").partition(":")
    original = resolved(sys.modules[module], attribute) if name else kernel
    watched = process.current().find(tuner_of(original) or original)
    if watched is not None and not tma_descriptor_metadata:
        watched.add_trace(bound, grid, getattr(kernel, "configs", ()))


def recorded_run(original: Callable[..., Any], kind: type, current: process.Process) -> Any:
    """Return ``run`` of a class of kernels, recorded. What happens at each launch is written for speed.

    A call from ``run`` of a class below is not recorded again.
    """
    original = window.counted(original)
    watched_by_id = current.watched[kind]

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            watched = watched_by_id[id(self)]
            if watched.unseen > 0:
                watched.unseen -= 1
                is_counted = True
            else:
                entry = watched.entries[signature_of(watched.names, args, kwargs, watched.ignored)]
                count = entry.count + watched.weight
                is_counted = count < entry.due
                if is_counted:
                    entry.count = count
                    watched.calm += 1
                    if watched.calm > CALM:
                        watched.unseen = STRIDES[watched.calm % len(STRIDES)]
                        watched.weight = watched.unseen + 1
        except Exception:
            is_counted = False
        if is_counted:
            return original(self, *args, **kwargs)
        kernel = None
        try:
            kernel = current.find(self) if type(self) is kind else None
        except Exception as error:
            _say_once(f"a kernel is not recorded: {error!r}")
        launch = functools.partial(original, self)
        return launch(*args, **kwargs) if kernel is None else kernel.run(launch, args, kwargs)

    run.fp8tune_original = original  # type: ignore[attr-defined]
    return run


def _marked_as_tuning(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        _tuning.depth = getattr(_tuning, "depth", 0) + 1
        try:
            return original(self, *args, **kwargs)
        finally:
            _tuning.depth -= 1

    return run


def _tuned_without_a_gpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` that gives an unknown key the first config on Triton's interpreter, where nothing can be timed."""
    triton = sys.modules["triton"]

    @functools.cache
    def has_driver() -> bool:
        try:
            return triton.runtime.driver.active is not None
        except Exception:
            return False

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))  # which pruning reads
        is_timed = len(self.configs) > 1 and not kwargs.get("warmup") and self._do_bench is None
        if is_timed and not has_driver() and (key := tuning_key(self, args, kwargs)) not in self.cache:
            self.cache[key] = self.prune_configs(kwargs)[0]
            if isinstance(self.cache, pinning.TunedConfigs):
                self.cache.note(key, 0.0)
            _say_once("no GPU here: nothing is tuned at run time, and each kernel takes its first config")
        return original(self, *args, **kwargs)

    return run if triton.knobs.runtime.interpret else original


@functools.cache
def _say_once(text: str) -> None:
    print(f"fp8tune: {text}", file=sys.stderr)
