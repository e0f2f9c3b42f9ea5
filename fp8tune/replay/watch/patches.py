"""Wrap Triton's own functions in a recorded process. Each launch goes on, whatever the recorder does."""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fp8tune.replay.naming import attribute_of
from fp8tune.replay.watch import process, window
from fp8tune.replay.watch.kernel import DECLARED
from fp8tune_kernels.pinning.installed import TunedConfigs
from fp8tune_kernels.pinning.reach import own_class
from fp8tune_kernels.pinning.watching import watch
from fp8tune_kernels.tuners import chain, resolved, tuner_of, tuning_key


class _Thread(threading.local):
    is_launching = False  # True inside a launch: what a tuner or a hook launches is no launch of the program


_thread = _Thread()


def patch_autotuner(module: ModuleType) -> None:
    """Wrap ``Autotuner.run`` of a module that was just imported, and ``JITFunction.run`` if bare kernels count."""
    current, autotuner = process.current(), module.Autotuner
    watch()
    patch_bare(module)
    autotuner.run = recorded_run(_untimed(autotuner.run), current)
    initialize = autotuner.__init__

    @functools.wraps(initialize)
    def noting_configs(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        DECLARED[self] = tuple(self.configs)
        kind = next(kind for kind in own_class(self).__mro__ if "run" in vars(kind))
        if not hasattr(kind.run, "fp8tune_records"):  # a class that launches by itself, of this one or of one above it
            kind.run = recorded_run(kind.run, current)

    autotuner.__init__ = noting_configs


def patch_bare(module: ModuleType) -> None:
    """Wrap ``run`` of JITFunction or InterpretedFunction, if bare kernels count."""
    for name in ("JITFunction", "InterpretedFunction"):
        if name in vars(module) and process.current().patterns:
            kind = vars(module)[name]
            kind.run = recorded_run(kind.run, process.current())


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


def recorded_run(original: Callable[..., Any], current: process.Process) -> Any:
    """Return a kernel class's ``run``, recorded."""
    counted, watched_by_id = window.counted(original), current.watched

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _thread.is_launching or kwargs.get("warmup"):
            return original(self, *args, **kwargs)
        _thread.is_launching = True
        try:
            watched = watched_by_id.get(id(self)) or current.find(self)
            if watched is None or watched.is_counted(args, kwargs):
                return counted(self, *args, **kwargs)
            return watched.run(functools.partial(counted, self), args, kwargs)
        finally:
            _thread.is_launching = False

    run.fp8tune_records = functools.partial(recorded_run, current=current)  # type: ignore[attr-defined]
    return run


def _untimed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` that gives an unknown key the first config on Triton's interpreter, where nothing is timed."""
    if not sys.modules["triton"].knobs.runtime.interpret:
        return original
    sys.excepthook = functools.partial(_explained, sys.excepthook)

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self.configs) > 1 and not kwargs.get("warmup") and self._do_bench is None:
            key = tuning_key(self, args, kwargs)
            if key not in self.cache:
                self.nargs = dict(zip(self.arg_names, args, strict=False))  # which pruning reads
                self.cache[key] = self.prune_configs(kwargs)[0]
                if isinstance(self.cache, TunedConfigs):
                    self.cache.note(key, 0.0)
                _say_once("Triton's interpreter times nothing: each kernel takes its first config")
        return original(self, *args, **kwargs)

    return run


def _explained(show: Callable[..., Any], kind: Any, error: BaseException, trace: Any) -> None:
    """Show an exception that ends the program, and what helps if torch.compile traced Triton's interpreter."""
    show(kind, error, trace)
    if "torch._dynamo" in sys.modules and "dynamo" in "".join(traceback.format_exception(error)):
        _say_once("torch.compile cannot trace Triton's interpreter: put TORCHDYNAMO_DISABLE=1 in front")


@functools.cache
def _say_once(text: str) -> None:
    print(f"fp8tune: {text}", file=sys.stderr)
