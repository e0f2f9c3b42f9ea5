"""The files of Triton's own autotune cache: an unchanged program under ``TRITON_CACHE_AUTOTUNING=1`` times nothing.

A file's key hashes Triton itself (that very build), its assembler, the kernel's source, the tuning key and the configs
that pruning leaves. So it is written in the environment that the program runs in: the kernel is imported, and the
installed Triton makes key and file. A stand-in driver names the GPU, which need not be here, and a stand-in cache
manager keeps what would be written. The key names no device: each has its folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path, PurePosixPath
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from fp8tune.errors import UsageError, one_line
from fp8tune.export.formats import PublishedPick
from fp8tune.export.formats.compromise import least_worst
from fp8tune.export.given import File, Given, Tuned
from fp8tune.records import NamedInts
from fp8tune.replay.loading import imported_module
from fp8tune.replay.recording import Config, Launch, Tensor, Value
from fp8tune.replay.values import decoded, has_function
from fp8tune.text import visible
from fp8tune_kernels.arches import ARCHES

LARGEST_BYTES = 16 * 2**20
"""Of a file that is read: Triton's own have some kilobytes."""

EVIDENCE = "evidence.json"
"""Beside a cache file, which has no place for it."""

_ELSE = "use fp8tune.pin"


def _silent(_: str) -> None:
    pass


def folder_of(given: Given) -> str:
    """The folder of a device, below the one that the user names: ``TRITON_CACHE_DIR``."""
    return re.sub(r"[^A-Za-z0-9.\-]+", "_", given.device.name or given.device.arch).strip("_.") or "device"


def write(given: Given, notice: Callable[[str], None] = _silent) -> list[File]:
    """One cache file and one ``evidence.json`` beside it for each tuning key; imports the kernel, needs no GPU.

    Launches that share a key get the config whose largest loss is least. ``notice`` gets one line for each launch that
    is left out. Raises UsageError where Triton would read none of the files.
    """
    autotuner = _autotuner(given)
    by_key: dict[str, list[Tuned]] = {}
    for one in given.tuned:  # a key may hold what cannot be hashed
        by_key.setdefault(json.dumps(one.launch.key) if one.launch else "", []).append(one)
    files: list[File] = []
    for tuned in by_key.values():
        try:
            files += _files(given, tuned, autotuner)
        except _RefusedError as refused:
            for one in tuned:
                notice(f"{given.kernel}: {one.problem.shape}: {refused}")
    if not files:
        raise UsageError(f"no launch of {given.kernel} can be written for Triton's cache: {_ELSE}")
    return files


class _RefusedError(Exception):
    """Why a launch has no file."""


def _autotuner(given: Given) -> Any:
    """The kernel's Autotuner. Raises UsageError for one that Triton's cache cannot serve from here."""
    if given.recorded is None or not given.recorded.is_autotuned:
        raise UsageError(f"{given.kernel} has no triton.autotune: export it --for python")
    if given.device.arch not in ARCHES:
        raise UsageError(f"Triton's cache is read on a GPU, and {given.device.arch} is none: export --for python")
    installed = metadata.version("triton")
    if given.device.triton not in ("", installed):
        raise UsageError(
            f"measured under triton {given.device.triton}, and {installed}, installed here, makes other keys: "
            f"export where {given.device.triton} is installed, or {_ELSE}"
        )
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    kernel = _imported(given.kernel)
    chain = list(_wrapped(kernel))
    found = next((each for each in chain if isinstance(each, Autotuner)), None)
    if found is None:
        raise UsageError(f"{given.kernel} has no triton.autotune any more: record it again")
    if not any(isinstance(each, JITFunction) for each in chain):
        raise UsageError(f"{given.kernel} is interpreted here: unset TRITON_INTERPRET")
    if len(found.configs) < 2:
        raise UsageError(f"{given.kernel} declares one config, which Triton launches without its cache: edit that one")
    return found


def _imported(name: str) -> Any:
    """What ``module:attribute`` names; the module may lie in the current folder, and may print."""
    module, _, attribute = name.partition(":")
    try:
        found: Any = imported_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except UsageError as error:
        raise UsageError(f"{error}: export where the program runs") from error
    except AttributeError as error:
        raise UsageError(f"cannot import {name}: {one_line(error)}: export where the program runs") from error
    return found


def _wrapped(kernel: Any) -> Iterator[Any]:
    while kernel is not None:
        yield kernel
        kernel = getattr(kernel, "fn", None)


def _files(given: Given, tuned: Sequence[Tuned], autotuner: Any) -> list[File]:
    """Of one key."""
    launch = tuned[0].launch
    if launch is None:
        raise _RefusedError("not recorded, so its key is not known: record it")
    pick, slowdown = least_worst(tuned)
    with _target(given.device.arch):
        try:
            key = tuple(map(_value, launch.key))
            lists = [_pruned(autotuner, one.launch) for one in tuned if one.launch]
        except Exception as error:  # what pruning raises is anything
            raise _RefusedError(f"its configs cannot be found out here: {one_line(error)}") from error
        if not key:
            raise _RefusedError("an empty key, which Triton does not cache")
        if any(config.pre_hook for config in lists[0]):
            raise _RefusedError(f"some config has a pre_hook, which Triton does not cache: {_ELSE}")
        if len(lists[0]) < 2:
            raise _RefusedError("pruning leaves one config, which Triton 3.8 launches without its cache")
        timings = _timings(given, pick, tuned)
        cached = dict(_cached(autotuner, key, configs, timings) for configs in lists)  # pruning may tell them apart
        folder = PurePosixPath(folder_of(given))
        evidence = _evidence(given, launch.key, tuned, slowdown)
    return [
        file
        for path, text in cached.items()
        for file in (File(folder / path, text), File(folder / path.parent / EVIDENCE, evidence))
    ]


def _timings(given: Given, pick: NamedInts, tuned: Sequence[Tuned]) -> dict[Any, list[float] | None]:
    """Config -> its mean over the launches in ms, in a list as Triton's benchmark gives three; the pick first.

    Triton launches the least, so configs as fast as the pick are left out. A pick without a time stands alone.
    """
    picked = _triton_config(given.configs[pick])
    times_us = {
        config: fmean(one.times_us[config] for one in tuned)
        for config in tuned[0].times_us
        if all(config in one.times_us for one in tuned)
    }
    if pick not in times_us:
        return {picked: None}
    slower = {config: time_us for config, time_us in times_us.items() if times_us[pick] < time_us < math.inf}
    named = {_triton_config(given.configs[config]): [time_us / 1000] for config, time_us in slower.items()}
    return {picked: None} | named | {picked: [times_us[pick] / 1000]}


def _triton_config(config: Config) -> Any:
    from triton import Config as TritonConfig

    kwargs = {name: _value(value) for name, value in config.kwargs.items()}
    if strange := next((name for name, value in kwargs.items() if not _is_plain(value)), None):
        raise _RefusedError(f"{strange}={kwargs[strange]!r} cannot be told from JSON again: {_ELSE}")
    return TritonConfig(kwargs, config.num_warps, config.num_stages, config.num_ctas, config.maxnreg)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def _pruned(autotuner: Any, launch: Launch) -> Sequence[Any]:
    """The configs that the reader will be left with, by its own ``prune_configs``."""
    declared = autotuner.configs
    own = declared if launch.configs is None else [_own(declared, config) for config in launch.configs]
    if not (autotuner.early_config_prune or autotuner.perf_model):
        return list(own)
    arguments = {one.name: _meta(one) if isinstance(one, Tensor) else _value(one.value) for one in launch.arguments}
    options = {"grid": (1, 1, 1), "warmup": False, **{name: _value(value) for name, value in launch.options.items()}}
    # callers name what they like, so a function that prunes finds each argument both ways; a model gets it once
    autotuner.nargs, autotuner.configs = arguments, own
    try:
        return list(autotuner.prune_configs(options if autotuner.perf_model else {**arguments, **options}))
    finally:
        autotuner.nargs, autotuner.configs = None, declared


def _own(declared: Sequence[Any], config: Config) -> Any:
    """A config of the list that the program set for a launch; the kernel's own object, with its hook, if there is."""
    made = _triton_config(config)
    return next((one for one in declared if one.all_kwargs() == made.all_kwargs()), made)


def _meta(tensor: Tensor) -> Any:
    import torch

    made = torch.empty_strided(tensor.shape, tensor.strides, dtype=getattr(torch, tensor.dtype), device="meta")
    if tensor.descriptor is None:
        return made
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(made, list(tensor.descriptor))


def _value(value: Value) -> Any:
    """A recorded value as Python has it. Raises ValueError for a function."""
    if has_function(value):
        raise ValueError(f"{value} has no lasting text")
    return decoded(value)


def _cached(autotuner: Any, key: tuple[Any, ...], configs: Sequence[Any], timings: Any) -> tuple[PurePosixPath, str]:
    """The path and the text that Triton itself makes after a benchmark that gave these timings."""
    from triton import knobs
    from triton.runtime.cache import CacheManager

    put: list[tuple[PurePosixPath, str]] = []

    class Kept(CacheManager):  # type: ignore[misc]
        def __init__(self, directory: str, **_: Any) -> None:
            self._directory = PurePosixPath(directory)

        def get_file(self, filename: str) -> None:
            return None

        def put(self, data: str, filename: str, binary: bool = True) -> str:
            put.append((self._directory / filename, data))
            return filename

        def get_group(self, filename: str) -> None:
            return None

        def put_group(self, filename: str, group: Mapping[str, str]) -> None:
            pass

    def benchmark() -> None:
        autotuner.configs_timings = timings

    held = getattr(autotuner, "configs_timings", None)
    with knobs.cache.scope():
        knobs.cache.manager_class = Kept
        try:
            autotuner.check_disk_cache(_key(key), configs, benchmark)
        except Exception as error:
            raise _RefusedError(f"Triton cannot write it: {one_line(error)}") from error
        finally:
            autotuner.configs_timings = held
    if not put:
        raise _RefusedError("Triton does not cache it")
    return put[0]


class _Key(tuple[Any, ...]):
    """A tuning key as JSON can hold it, whose text, which Triton hashes, is the real one's: nobody reads the JSON."""

    text: str

    def __str__(self) -> str:
        return self.text


def _key(real: tuple[Any, ...]) -> _Key:
    key = _Key(value if _is_plain(value) else str(value) for value in real)
    key.text = str(real)
    return key


@contextlib.contextmanager
def _target(arch: str) -> Iterator[None]:
    """While open, Triton's driver knows its target and nothing else."""
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


def _evidence(given: Given, key: tuple[Value, ...], tuned: Sequence[Tuned], slowdown: float) -> str:
    """Where the pick comes from, and what the key was made with besides the kernel."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend
    from triton.runtime.driver import driver

    known = {
        "kernel": given.kernel,
        "key": key,
        "launches": [
            {"shape": dict(one.problem.shape), "evidence": one.evidence, "verdict": one.verdict, "check": one.check}
            for one in tuned
        ],
        "largest_loss": slowdown - 1,
        "device": given.device.name,
        "arch": given.device.arch,
        "triton": metadata.version("triton"),
        "backend": make_backend(driver.active.get_current_target()).hash(),
        "environment": get_cache_invalidating_env_vars(),
    }
    return json.dumps(known, indent=1) + "\n"


def read(folder: Path, notice: Callable[[str], None] = _silent) -> list[PublishedPick]:
    """The picks of a Triton cache: of each file the config with the least time, which Triton would launch.

    ``notice`` gets one line for each file that cannot be used. Raises UsageError for a folder that cannot be listed.
    """
    if not folder.is_dir():
        raise UsageError(f"{str(folder)!r} is no folder: name a TRITON_CACHE_DIR, or the folder of one device")
    picks = []
    for path in sorted(folder.rglob("*.autotune.json")):
        try:
            picks.append(_pick(path))
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
            notice(f"{visible(str(path))}: no autotune cache that can be read: {visible(one_line(error))}")
    return picks


def _pick(path: Path) -> PublishedPick:
    document = _json(path)
    timed = [(_time_us(time), config) for config, time in document["configs_timings"]]
    if not timed:
        raise ValueError("no config")
    time_us, config = min(timed, key=lambda one: one[0])
    if math.isinf(time_us):
        raise ValueError("no config ran")
    sidecar = path.with_name(EVIDENCE)
    says = _json(sidecar) if sidecar.is_file() else {}
    name = says.get("kernel") or path.name.removesuffix(".autotune.json")
    if not isinstance(name, str) or not name.isprintable():
        raise ValueError("a kernel name that is no text")
    key = says.get("key", document["key"])
    if not isinstance(key, list):
        raise ValueError("a key that is no list")
    return PublishedPick(
        kernel=name,
        key=tuple(map(_recorded, key)),
        config=_recorded_config(**config),
        time_us=time_us or None,
        source=f"Triton cache {visible(path.parent.name)}/{visible(path.name)}",
    )


def _json(path: Path) -> Any:
    if not path.is_file() or path.stat().st_size > LARGEST_BYTES:
        raise ValueError(f"no file of at most {LARGEST_BYTES >> 20} MiB")
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"{type(document).__name__} instead of an object")
    return document


def _time_us(timing: Any) -> float:
    """The median, which comes first, in microseconds; 0 for none and infinity for a config that did not run."""
    if timing == []:
        raise ValueError("an empty list instead of a time in ms")
    ms = timing[0] if isinstance(timing, list) else timing
    if ms is None:
        return 0.0
    if isinstance(ms, bool) or not isinstance(ms, int | float) or not ms >= 0:
        raise ValueError(f"{ms!r:.40} instead of a time in ms")
    return ms * 1000.0


def _recorded(value: Any) -> Value:
    """A JSON value as a recording holds it."""
    if isinstance(value, dict):
        return {
            name: tuple(map(_recorded, inner)) if isinstance(inner, list) else inner for name, inner in value.items()
        }
    if isinstance(value, list):
        return {"tuple": tuple(map(_recorded, value))}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _recorded_config(
    kwargs: Any, num_warps: Any, num_stages: Any, num_ctas: Any = 1, maxnreg: Any = None, **others: Any
) -> Config:
    if any(others.values()):
        raise ValueError(f"a config with {next(name for name, value in others.items() if value)!r:.40}")
    integers = [num_warps, num_stages, num_ctas, *([] if maxnreg is None else [maxnreg])]
    if not isinstance(kwargs, dict) or not all(type(one) is int and 0 < one < 2**31 for one in integers):
        raise ValueError("a config that Triton does not take")
    named = {name: _recorded(value) for name, value in kwargs.items()}
    return Config(named, num_warps, num_stages, num_ctas, maxnreg)
