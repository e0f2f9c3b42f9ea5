"""Files for Triton's autotune cache. With ``TRITON_CACHE_AUTOTUNING=1``, an unchanged program then benchmarks nothing.

A file's key is a hash of the Triton build, its assembler, the kernel's source, the tuning key and the configs. To get
the same key, the kernel is imported and the installed Triton writes the file, with a stub driver that names the GPU. No
GPU is needed. The key does not name the device, so each device has its own folder.
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
from types import SimpleNamespace
from typing import Any

from fp8tune.errors import UsageError, one_line
from fp8tune.records import Device
from fp8tune.replay.loading import imported_module
from fp8tune.replay.values import decoded
from fp8tune.stats.means import group_by
from fp8tune.tables.files import File
from fp8tune.tables.formats import Format, Options
from fp8tune.tables.picks import KernelPicks, Pick, shared_config
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.tuners import chain, resolved, tuner_of

_ADVICE = "export --for python, and use fp8tune.pin"


def write(kernels: Sequence[KernelPicks], options: Options) -> list[File]:
    """Return a cache file for each tuning key. Imports the kernel; needs no GPU."""
    (kernel,) = kernels
    autotuner, folder = _import_autotuner(kernel), folder_of(kernel.device)
    files: list[File] = []
    for picks in group_by(kernel.picks, lambda pick: json.dumps(pick.key)).values():
        try:
            with _set_target(kernel.device.arch):
                files += [File(folder / path, text) for path, text in _write_cache(kernel, picks, autotuner).items()]
        except UsageError as error:
            for pick in picks:
                options.notice(f"{kernel.kernel}: {pick.problem.shape} cannot be written: {error}")
    if not files:
        raise UsageError(f"no launch of {kernel.kernel} can be written for Triton's cache: {_ADVICE}")
    return files


def folder_of(device: Device) -> PurePosixPath:
    """Return the folder of a device: keys of the cache do not name it."""
    return PurePosixPath(re.sub(r"[^A-Za-z0-9.\-]+", "_", device.name).strip("_.") or device.arch)


def _import_autotuner(kernel: KernelPicks) -> Any:
    """Import the kernel and return its Autotuner. Raises UsageError if no cache file can be written for it here."""
    arch, measured, installed = kernel.device.arch, kernel.device.triton, metadata.version("triton")
    if kernel.recorded is None or not kernel.recorded.is_autotuned or arch not in ARCHES:
        raise UsageError(f"{kernel.kernel} on {arch} has no triton.autotune or no GPU: export it --for python")
    if measured not in ("", installed):
        raise UsageError(f"measured under triton {measured}, {installed} makes other keys: export there, or {_ADVICE}")
    from triton.runtime.jit import JITFunction

    module, _, attribute = kernel.kernel.partition(":")
    try:
        launched = resolved(imported_module(module), attribute)
    except (UsageError, AttributeError, LookupError) as error:
        raise UsageError(f"cannot import {kernel.kernel}: {one_line(error)}: export where the program runs") from error
    autotuner = tuner_of(launched)
    if autotuner is None or not any(isinstance(item, JITFunction) for item in chain(launched)):
        raise UsageError(f"{kernel.kernel} has no triton.autotune any more or is interpreted: record it again")
    for is_unfit, problem in (
        (autotuner.early_config_prune or autotuner.perf_model, "prunes its configs"),
        (any(pick.launch and pick.launch.configs for pick in kernel.picks), "launches configs that its program sets"),
        (any(config.pre_hook for config in autotuner.configs), "has a pre_hook"),
        (len(autotuner.configs) < 2, "has a single config"),
    ):
        if is_unfit:
            raise UsageError(f"{kernel.kernel} {problem}, for which Triton reads no cache: {_ADVICE}")
    return autotuner


def _write_cache(kernel: KernelPicks, picks: Sequence[Pick], autotuner: Any) -> dict[str, str]:
    """Let Triton write its cache for the tuning key that the picks share. Return the text of each path."""
    from triton import Config, knobs

    key = tuple(map(decoded, picks[0].key))
    if not key or not all(map(_is_json_scalar, key)):
        raise UsageError(f"Triton does not cache the key {key!r}: {_ADVICE}")
    chosen = shared_config(picks)
    config = kernel.triton_config(chosen)
    kwargs = {name: decoded(value) for name, value in config.kwargs.items()}
    if not all(map(_is_json_scalar, kwargs.values())):
        raise UsageError(f"a value of {kwargs} is none of JSON's: {_ADVICE}")
    fastest = Config(kwargs, config.num_warps, config.num_stages, config.num_ctas, config.maxnreg)

    def benchmark() -> None:  # as if it had measured this config alone: Triton launches the fastest
        autotuner.configs_timings = {fastest: [picks[0].study.times_us[chosen] / 1000]}

    before = getattr(autotuner, "configs_timings", None)
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        try:
            autotuner.check_disk_cache(key, autotuner.configs, benchmark)
        finally:
            autotuner.configs_timings = before
        files = Path(folder).rglob("*.autotune.json")
        return {str(path.relative_to(folder)): path.read_text() for path in sorted(files)}


def _is_json_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


@contextlib.contextmanager
def _set_target(arch: str) -> Iterator[None]:
    """Replace Triton's driver by a stub that only knows the arch."""
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
