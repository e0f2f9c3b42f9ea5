"""Make kernels take their configs from a table at run time: they are not timed, so every rank launches the same.

Triton's own autotuner still makes the key and launches; only the dictionary in which it looks configs up is another.
``torch.compile`` is given one config where it copies the configs of a kernel. Kernels get a class whose ``run`` goes by
the table: at their first launch, so it does not matter which module makes them, or when.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..tuners import function_name
from .compare import moved
from .environment import MODES, VARIABLE, chosen
from .environment import pin_from_environment as pin_from_environment
from .errors import PinError as PinError
from .installed import Pinned, TunedConfigs
from .keys import Key
from .registry import Entry, compare_ranks, entries, from_environment, pins, unpinned, waiting
from .tables import Table
from .targets import is_of, target_of
from .watching import absent, install_all, pin_all, tuners, uninstall
from .watching import watch as watch


def pin(
    table: str | os.PathLike[str] | Mapping[Key, Any],
    kernel: Any = None,
    *,
    unknown: str = "nearest",
    stale: str = "unpin",
) -> None:
    """Make all kernels of a table, or one, take their configs from it instead of timing them.

    ``table``: a file that ``fp8tune export --for python`` wrote, a folder of such files, or, for an autotuned kernel,
    a dict of keys to the arguments of ``triton.Config``:
    ``{(4096, "torch.bfloat16"): {"kwargs": {"BLOCK": 128}, "num_warps": 8}}``. Of a file the configs of the current
    device count, those of a dict on every device. A config gets the ``pre_hook`` that the kernel declares for it.

    ``kernel``: a ``triton.autotune`` kernel, ``triton.heuristics`` around it or not, or a bare ``triton.jit`` kernel,
    which takes options such as ``num_warps`` in every launch, and constants in launches that equal a checked one.
    Without it, all kernels that the files name are pinned: now, or at their first launch if their modules are imported
    later.

    ``unknown`` says what happens for keys that the table lacks:

    - ``nearest``: the config of the key with equal dtypes, texts and flags whose numbers are nearest on a log scale,
      of those that the kernel declares and does not prune for the launch. The same on every rank. Raises PinError where
      no such key exists.
    - ``strict``: the launch raises PinError with the key and the command that tunes it.
    - ``tune``: Triton tunes the key, so ranks may disagree on it.
    - ``off``: the table is not used at all; Triton tunes every key.

    ``stale`` says what happens if the kernel's code is not the code that was measured: ``unpin`` warns once, and the
    kernel is launched as without a table; PinError in ``strict`` and in a job of several ranks. ``use`` takes the table
    all the same, and configs of a dict that the kernel does not declare. ``FP8TUNE_PIN_STALE`` replaces it.

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
    tables = chosen(table, stale)
    if kernel is None:
        pin_all([item for item in tables if item.kernel not in from_environment], mode)
    else:
        matching = [item for item in tables if is_of(kernel, item)] or [item for item in tables if moved(kernel, item)]
        if not matching:
            raise PinError(f"no table in {str(table)!r} is of {function_name(target_of(kernel))}: export one for it")
        if not any(is_of(kernel, item) for item in from_environment.values()):
            pin_to(kernel, matching[0], mode)
    compare_ranks()


def pin_to(kernel: Any, table: Table, unknown: str) -> None:
    """Pin one kernel to one table of :func:`tables_of`, whatever the environment says."""
    target = target_of(kernel)
    install_all([Pinned(target, table, unknown)])
    entries[id(target)] = Entry(table, unknown, target)
    watch()


def unpin(kernel: Any = None) -> None:
    """Undo :func:`pin` for a kernel, or for all: Triton tunes it again, with what it had tuned before."""
    for target in [pinned.target for pinned in pins.values()] if kernel is None else [target_of(kernel)]:
        uninstall(target)
    for name, entry in list(entries.items()):
        if kernel is None or entry.target is target_of(kernel) or (not entry.target and is_of(kernel, entry.table)):
            del entries[name]
    if kernel is None:
        unpinned.clear()


def pin_report() -> dict[str, Any]:
    """Return what kernels of this process took their configs from, for ``json.dumps``.

    ``kernels``: those that are pinned, and those that tuned at run time, with ``keys`` (key -> key of the table) and
    ``tuned_s`` (key -> seconds of its run-time tuning); ``waiting``: those in tables that have not been launched;
    ``unpinned``: those that were launched with configs of their own or are gone, with ``kernel`` and ``reason``.
    """
    pinned = [item.report() for item in list(pins.values())]
    others = [item for item in list(tuners) if id(item) not in pins]
    tuned = [item.cache.report() for item in others if isinstance(item.cache, TunedConfigs) and item.cache.tuned_s]
    return {
        "kernels": sorted(pinned + tuned, key=lambda item: str(item["kernel"])),
        "waiting": sorted(table.kernel for table in waiting()),
        "unpinned": [{"kernel": name, "reason": reason} for name, reason in (*unpinned, *absent())],
    }


def configs_of(kernel: Any) -> Any:
    """Return the dictionary from which an autotuner takes configs by key; that of a bare kernel if it is pinned."""
    return pins[id(kernel)] if id(kernel) in pins else getattr(kernel, "cache", None)


def keys_of(kernel: Any) -> dict[str, Any]:
    """Return the entry of an autotuner or bare kernel in :func:`pin_report`; empty for one that is not watched."""
    configs = configs_of(kernel)
    return configs.report() if isinstance(configs, TunedConfigs) else {}
