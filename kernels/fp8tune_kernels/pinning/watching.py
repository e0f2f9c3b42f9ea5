"""Reach the launches of kernels: pin at their first launch those that tables name, and note why others are not."""

from __future__ import annotations

import atexit
import functools
import importlib
import weakref
from collections.abc import Callable
from typing import Any

from ..tuners import chain, function_name, is_kernel
from .compare import current_code
from .compiled import watch_compiler
from .installed import Pinned, TunedConfigs, own_configs
from .reach import derived, existing_kernels, own_class, release, triton_kinds
from .registry import Entry, entries, lock, logger, pins, unpinned, waiting
from .tables import Table
from .targets import absence_of, entries_near, entry_of, kernel_named, target_of

tuners: weakref.WeakSet[Any] = weakref.WeakSet()
"""Autotuners whose run-time tuning is noted."""


@functools.cache
def _reached(kind: Any) -> type:
    """Return the class of a kernel until its first launch, and as long as it is pinned."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        pinned = pins.get(id(self))
        if pinned is None:
            pinned = _decided(self)
        if pinned is None or pinned.launch is None:
            if pinned is not None:
                pinned.launching.kwargs = kwargs
            return kind.run(self, *args, **kwargs)
        return pinned.launch(*args, **kwargs)

    return derived(kind, run=run)


@functools.cache
def _looking_up(kind: Any) -> type:
    """Return the class of a pinned kernel that Triton launches with the table: a ``run`` here would cost 2 us.

    Its copies are not pinned before their first launch.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        _arm(self)
        try:
            return kind.__reduce_ex__(self, protocol)
        finally:
            _arm(self, _looking_up)

    return derived(kind, __reduce_ex__=reduce)


@functools.cache
def _bypassed(kind: Any) -> type:
    """Return the class of what a pinned autotuner wraps, launched by ``run`` there, and by ``[grid]`` elsewhere."""

    def get_launch(self: Any, grid: Any) -> Any:
        release(self)
        note(self, "launched without its autotuner: launch that, and not what it wraps")
        return self[grid]

    return derived(kind, __getitem__=get_launch)


def _arm(kernel: Any, make: Callable[[type], type] = _reached) -> None:
    kernel.__class__ = make(own_class(kernel))


def _is_armed(kernel: Any, make: Callable[[type], type] = _reached) -> bool:
    return type(kernel) is make(own_class(kernel))


def _decided(kernel: Any) -> Pinned | None:
    """Pin or release a kernel at its first launch. What it wraps is launched by it, and not pinned on its own."""
    with lock:
        if id(kernel) not in pins and _is_armed(kernel):  # else another thread was first
            entry, reason = _found(kernel)
            install_all([Pinned(kernel, entry.table, entry.mode)] if entry else [])
            if id(kernel) not in pins:
                for item in filter(is_kernel, chain(kernel)):
                    release(item)
                if hasattr(kernel, "configs"):
                    kernel.cache = own_configs(kernel)
                if reason or (hasattr(kernel, "configs") and entries and not entry):
                    note(kernel, reason or "no table names it")
            atexit.unregister(_warn_of_absent)  # else it would be called as often
            atexit.register(_warn_of_absent)
        return pins.get(id(kernel))


def _found(kernel: Any) -> tuple[Entry | None, str]:
    """Return the table for a kernel, or None and the reason. Of another file it needs to have the same code."""
    entry, reason = entry_of(kernel)
    for near in [] if entry or reason else entries_near(kernel):
        if current_code(kernel, near.table) in {*near.table.codes.values()} - {""}:
            return near, ""
        reason = f"its code is not that of {near.table.kernel}, which has a table"
        logger.warning("%s is not pinned: %s", function_name(kernel), reason)
    return entry, reason


def note(kernel: Any, reason: str) -> None:
    """Note why a kernel is not pinned."""
    unpinned[function_name(kernel), reason] = None


def absent() -> list[tuple[str, str]]:
    """Return the kernels that are not where their tables name them, with the reason."""
    return [(table.kernel, reason) for table in waiting() if (reason := absence_of(table))]


def _warn_of_absent() -> None:
    """Say that tables pin nothing, at the end of a process that launched kernels."""
    if names := absent():
        more = f", nor are those of {len(names) - 1} more tables" if len(names) > 1 else ""
        text = "%s is not pinned, as %s%s: export its table again, under its new name"
        logger.warning(text, *names[0], more)


def pin_all(tables: list[Table], mode: str, *, may_lack_modules: bool = False) -> None:
    """Pin the kernels of tables; those that do not exist yet at their first launch."""
    kernels = [kernel_named(item, may_lack_modules) for item in tables]
    pairs = [(target_of(kernel), item) for kernel, item in zip(kernels, tables, strict=True) if kernel]
    install_all([Pinned(target, item, mode) for target, item in pairs])
    entries.update((item.kernel, Entry(item, mode)) for item in tables)
    watch()
    for kernel in existing_kernels():
        if id(kernel) not in pins and not _is_armed(kernel, _bypassed):
            _arm(kernel)
            if "run" in vars(kernel):  # launches go there, and it may have been made of the kernel's own class
                _decided(kernel)


def watch() -> None:
    """Note the run-time tuning of kernels made from now on, and pin those that tables name at their first launch."""
    importlib.import_module("triton.runtime.autotuner")  # all of Triton may not be imported yet
    for kind in triton_kinds():
        if not hasattr(kind.__init__, "fp8tune_watches"):
            kind.__init__ = _watched(kind.__init__)
    watch_compiler(_decided)


def _watched(initialize: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(initialize)
    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if hasattr(self, "configs"):
            self.cache = TunedConfigs(self, self.cache)
            tuners.add(self)
        if entries:
            _arm(self)

    watched.fp8tune_watches = True  # type: ignore[attr-defined]
    return watched


def install_all(new: list[Pinned]) -> None:
    """Install pins in the place of earlier ones; one whose mode is ``off`` only ends those."""
    for pinned in new:
        uninstall(pinned.target)
        if pinned.mode == "off":
            logger.warning("%s is not pinned to %s: off", pinned.name, pinned.table.source)
        else:
            pinned.install()
            pins[id(pinned.target)] = pinned
            _arm(pinned.target, _looking_up if pinned.is_only_looked_up else _reached)
            for item in filter(is_kernel, chain(pinned.target)):
                if id(item) not in pins:
                    _arm(item, _bypassed)


def uninstall(target: Any) -> None:
    """End the pin of an autotuner or bare kernel, if it has one."""
    if (pinned := pins.pop(id(target), None)) is not None:
        pinned.uninstall()
        for item in chain(target):
            if is_kernel(item) and id(item) not in pins:
                release(item)
