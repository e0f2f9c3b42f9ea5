"""Files of Triton's own autotune cache: an unchanged program under ``TRITON_CACHE_AUTOTUNING=1`` times nothing.

A file's key hashes this very build of Triton, its assembler, the kernel's source, the tuning key and the configs that
pruning leaves. So the kernel is imported and the installed Triton makes key and file, with a driver that only names the
GPU, which need not be here. The key names no device: each has its folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path, PurePosixPath
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from fp8tune.errors import UsageError, one_line
from fp8tune.records import NamedInts
from fp8tune.replay.loading import imported_module
from fp8tune.replay.recording import Config, Launch, Tensor, Value
from fp8tune.replay.values import decoded, has_function
from fp8tune.tables.files import File
from fp8tune.tables.formats import Format, Options
from fp8tune.tables.picks import KernelPicks, Pick, least_worst
from fp8tune_kernels.arches import ARCHES

EVIDENCE = "evidence.json"
"""Name of the file beside a cache file, which has no place for evidence."""

_ADVICE = "export --for python, and use fp8tune.pin"


class _RefusedError(Exception):
    """Reason why a launch has no file."""


def write(kernels: Sequence[KernelPicks], options: Options) -> list[File]:
    """Write a cache file, and the evidence beside it, for each tuning key. Imports the kernel; needs no GPU."""
    (kernel,) = kernels
    autotuner = _autotuner(kernel)
    by_key: dict[str, list[Pick]] = {}
    for pick in kernel.picks:
        by_key.setdefault(json.dumps(pick.key) if pick.launch else "", []).append(pick)
    files: list[File] = []
    for picks in by_key.values():
        try:
            files += _files(kernel, picks, autotuner)
        except _RefusedError as refused:
            for pick in picks:
                options.notice(f"{kernel.kernel}: {pick.problem.shape}: {refused}")
    if not files:
        raise UsageError(f"no launch of {kernel.kernel} can be written for Triton's cache: {_ADVICE}")
    return files


def _autotuner(kernel: KernelPicks) -> Any:
    """Return the kernel's Autotuner; refuse one that Triton's cache cannot serve from here."""
    if kernel.recorded is None or not kernel.recorded.is_autotuned:
        raise UsageError(f"{kernel.kernel} has no triton.autotune: export it --for python")
    if kernel.device.arch not in ARCHES:
        raise UsageError(f"Triton's cache is read on a GPU, and {kernel.device.arch} is none: export --for python")
    measured, installed = kernel.device.triton, metadata.version("triton")
    if measured not in ("", installed):
        raise UsageError(
            f"measured under triton {measured}, and {installed}, installed here, makes other keys: "
            f"export where {measured} is installed, or {_ADVICE}"
        )
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    module, _, attribute = kernel.kernel.partition(":")
    try:
        function: Any = imported_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
    except (UsageError, AttributeError) as error:
        raise UsageError(f"cannot import {kernel.kernel}: {one_line(error)}: export where the program runs") from error
    chain = [function]
    while (inner := getattr(chain[-1], "fn", None)) is not None:
        chain.append(inner)
    autotuner = next((item for item in chain if isinstance(item, Autotuner)), None)
    if autotuner is None:
        raise UsageError(f"{kernel.kernel} has no triton.autotune any more: record it again")
    if not any(isinstance(item, JITFunction) for item in chain):
        raise UsageError(f"{kernel.kernel} is interpreted here: unset TRITON_INTERPRET")
    if len(autotuner.configs) < 2:
        raise UsageError(f"{kernel.kernel} has one config, which Triton launches without its cache: edit that one")
    return autotuner


def _files(kernel: KernelPicks, picks: Sequence[Pick], autotuner: Any) -> list[File]:
    """Return the files of one key."""
    launch = picks[0].launch
    if launch is None:
        raise _RefusedError("not recorded, so its key is not known: record it")
    config, slowdown = least_worst(picks)
    with _target(kernel.device.arch):
        try:
            key = tuple(map(_value, launch.key))
            lists = [_pruned(autotuner, pick.launch) for pick in picks if pick.launch]
        except Exception as error:  # pruning functions raise anything
            raise _RefusedError(f"its configs are unknown here: {one_line(error)}") from error
        if not key or not all(map(_is_plain, key)):
            raise _RefusedError(f"the key {key!r} is empty or no JSON value, which Triton does not cache: {_ADVICE}")
        if any(declared.pre_hook for declared in lists[0]):
            raise _RefusedError(f"some config has a pre_hook, which Triton does not cache: {_ADVICE}")
        if len(lists[0]) < 2:
            raise _RefusedError("pruning leaves one config, which Triton 3.8 launches without its cache")
        cached = _cached(autotuner, key, lists, _timings(kernel, config, picks))
    origin = {"kernel": kernel.kernel, "key": launch.key, "device": kernel.device.name, "largest_loss": slowdown - 1}
    evidence = json.dumps({**origin, "launches": [pick.evidence for pick in picks]}, indent=1) + "\n"
    name = kernel.device.name or kernel.device.arch
    folder = PurePosixPath(re.sub(r"[^A-Za-z0-9.\-]+", "_", name).strip("_.") or "device")
    files = [File(folder / path, text) for path, text in cached.items()]
    return [*files, *(File(file.path.with_name(EVIDENCE), evidence) for file in files)]


def _timings(kernel: KernelPicks, chosen: NamedInts, picks: Sequence[Pick]) -> dict[Any, list[float] | None]:
    """Return the mean time of each config over the launches in ms, the chosen one first.

    Triton launches the fastest, so configs as fast as the chosen one are left out. Without a time it stands alone.
    """
    first = _triton_config(kernel.triton_config(chosen))
    times = [pick.study.times_us for pick in picks]
    times_us = {
        config: fmean(row[config] for row in times) for config in times[0] if all(config in row for row in times)
    }
    if chosen not in times_us:
        return {first: None}
    slower = {config: time_us for config, time_us in times_us.items() if times_us[chosen] < time_us < math.inf}
    others = {_triton_config(kernel.triton_config(config)): [time_us / 1000] for config, time_us in slower.items()}
    return {first: [times_us[chosen] / 1000], **others}


def _triton_config(config: Config) -> Any:
    from triton import Config as TritonConfig

    kwargs = {name: _value(value) for name, value in config.kwargs.items()}
    for name, value in kwargs.items():
        if not _is_plain(value):
            raise _RefusedError(f"{name}={value!r} has no JSON value: {_ADVICE}")
    return TritonConfig(kwargs, config.num_warps, config.num_stages, config.num_ctas, config.maxnreg)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def _pruned(autotuner: Any, launch: Launch) -> Sequence[Any]:
    """Return the configs that the reader will be left with, by its own ``prune_configs``."""
    if launch.configs is not None:
        raise ValueError("the program had set another list")
    if not (autotuner.early_config_prune or autotuner.perf_model):
        return list(autotuner.configs)
    arguments = {
        item.name: _meta(item) if isinstance(item, Tensor) else _value(item.value) for item in launch.arguments
    }
    options = {"grid": (1, 1, 1), "warmup": False, **{name: _value(value) for name, value in launch.options.items()}}
    # A function that prunes may look for each argument in either place; a model gets it once.
    autotuner.nargs = arguments
    try:
        return list(autotuner.prune_configs(options if autotuner.perf_model else {**arguments, **options}))
    finally:
        autotuner.nargs = None


def _meta(tensor: Tensor) -> Any:
    import torch

    made = torch.empty_strided(tensor.shape, tensor.strides, dtype=getattr(torch, tensor.dtype), device="meta")
    if tensor.descriptor is None:
        return made
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(made, list(tensor.descriptor))


def _value(value: Value) -> Any:
    """Return a recorded value as Python has it; refuse a function."""
    if has_function(value):
        raise ValueError(f"{value} has no lasting text")
    return decoded(value)


def _cached(autotuner: Any, key: tuple[Any, ...], lists: Sequence[Sequence[Any]], timings: Any) -> dict[str, str]:
    """Return paths and texts that Triton itself writes after a benchmark with these timings."""
    from triton import knobs

    def benchmark() -> None:
        autotuner.configs_timings = timings

    before = getattr(autotuner, "configs_timings", None)
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        try:
            for configs in lists:  # pruning may distinguish launches of one key
                autotuner.check_disk_cache(key, configs, benchmark)
        except Exception as error:
            raise _RefusedError(f"Triton cannot write it: {one_line(error)}") from error
        finally:
            autotuner.configs_timings = before
        files = Path(folder).rglob("*.autotune.json")
        return {str(path.relative_to(folder)): path.read_text() for path in sorted(files)}


@contextlib.contextmanager
def _target(arch: str) -> Iterator[None]:
    """Let Triton's driver know its target and nothing else."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    limits = ARCHES[arch]
    number = arch if limits.backend == "hip" else int(arch.removeprefix("sm_"))
    target = GPUTarget(limits.backend, number, limits.warp_size)
    active = driver._active  # driver.active would look for a GPU
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    try:
        yield
    finally:
        driver.set_active(active)


FORMAT = Format(write, "run the program with TRITON_CACHE_AUTOTUNING=1 TRITON_CACHE_DIR={folder}/{device}")
