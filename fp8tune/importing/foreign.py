"""Configs that others tuned, as published rows: JSON of Hugging Face kernels, vLLM and SGLang, and Triton's cache.

A row takes the name, problem and device that the database has for it, so that it stands beside what was measured;
without these it has the file's own words.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fp8tune.errors import UsageError, one_line
from fp8tune.records import Device, Kind, NamedInts, Outcome, Problem, Row, Status
from fp8tune.replay.configs import encoded
from fp8tune.replay.recording import CONFIG_OPTIONS, Config, Kernel, Launch, Value
from fp8tune.store.read import subjects_of
from fp8tune.store.results import Store
from fp8tune.store.texts import UNSTATED, check_sizes, parse_named_ints
from fp8tune.tables.current import recorded_launch
from fp8tune.tables.tuned_files import FileName, arch_of
from fp8tune.text import KERNEL_NAME as KERNEL
from fp8tune.text import NAME, WORD, visible

LARGEST_BYTES = 2**26
"""Size of the largest file that is read."""

Notice = Callable[[str], None]

_FAULTS = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)
"""Errors of a reader that meets another document than it expects."""

_FUSED_MOE_DTYPES = {"fp8_w8a8": ("float8_e4m3fn", "float8_e4m3fnuz"), "int8_w8a8": ("int8",)}
"""Dtype in file names of vLLM and SGLang -> dtypes of the activations."""


@dataclass(frozen=True)
class ForeignPick:
    """One config of somebody else's file: to be measured, not believed."""

    kernel: str
    """``module:attribute`` or the kernel's name in the file; empty where it has none."""
    key: tuple[Value, ...]
    config: Config
    source: str
    time_us: float | None = None
    shape: NamedInts = field(default_factory=NamedInts)
    """Sizes that the file names."""
    device: str = ""
    """Name of the device, often with ``_`` for blanks."""
    dtype: str = ""


def is_foreign(path: Path) -> bool:
    """Return True for a folder or a JSON file."""
    return path.is_dir() or path.suffix == ".json"


def read(path: Path, notice: Notice, kernel: str = "") -> list[ForeignPick]:
    """Read the configs of a file, or of all files below a folder.

    Args:
        path: A JSON file, or a folder.
        notice: Function that gets one line for each damaged file and each damaged entry; the others are read.
        kernel: Name of the kernel, whatever the files say.

    Raises:
        UsageError: Nothing can be read.
    """
    picks, faults = list[ForeignPick](), list[str]()
    for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
        source = visible(str(Path(path.name, file.relative_to(path))) if path.is_dir() else path.name)
        place = ""
        try:
            for name, make in _entries(file, source):
                place = f"{name[:40]!r}: " if name else ""
                try:
                    picks.append(make())
                except _FAULTS as error:
                    faults.append(f"{visible(str(file))} is damaged: {place}{visible(one_line(error))}")
        except _FAULTS as error:
            faults.append(f"{visible(str(file))} is damaged: {visible(one_line(error))}")
    if not picks and faults and not path.is_dir():
        raise UsageError(faults[0])
    for fault in faults:
        notice(f"left out: {fault}")
    if not picks:
        raise UsageError(
            f"{visible(str(path))} has no configs that can be read: give a Triton cache, or JSON of Hugging Face "
            "kernels, vLLM or SGLang"
        )
    return [replace(pick, kernel=kernel) for pick in picks] if kernel else picks


def _entries(path: Path, source: str) -> Iterator[tuple[str, Callable[[], ForeignPick]]]:
    """Yield each size in a file, and a function that reads its entry."""
    is_cache = path.name.endswith(".autotune.json")
    if not path.is_file() or not (is_cache or "device_name=" in path.name):
        return
    if path.stat().st_size > LARGEST_BYTES:
        raise ValueError(f"larger than {LARGEST_BYTES >> 20} MiB")
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"{type(document).__name__} instead of an object")
    if is_cache:
        yield "", lambda: _cached_pick(path, source, document)
        return
    of_file = _pick_of_name(path, source)
    for size, arguments in document.items():
        if size != "triton_version":
            yield size, functools.partial(_sized_pick, of_file, size, arguments)


def _pick_of_name(path: Path, source: str) -> ForeignPick:
    """Parse ``E=8,N=512,device_name=NVIDIA_H200,dtype=fp8_w8a8.json``. Flags are sizes of 1."""
    name = FileName.parse(path.stem)
    kernel = "fused_moe_kernel" if [*name.fields][:2] == ["E", "N"] else ""
    device, dtype = name.fields.get("device_name", ""), name.fields.get("dtype", "")
    return ForeignPick(kernel, (), Config({}), source, shape=NamedInts(name.sizes), device=device, dtype=dtype)


def _sized_pick(of_file: ForeignPick, size: str, arguments: Any) -> ForeignPick:
    if not re.fullmatch(r"[0-9]{1,19}", size):
        raise ValueError("that is no size")
    return replace(of_file, shape=NamedInts({**of_file.shape, "M": int(size)}), config=_config(arguments))


def _cached_pick(path: Path, source: str, document: Mapping[str, Any]) -> ForeignPick:
    """Return the config of a Triton cache with the least median time, which Triton would launch."""
    timed = []
    for config, timing in document["configs_timings"]:
        ms = timing[0] if isinstance(timing, list) else timing
        if ms is not None and (isinstance(ms, bool) or not isinstance(ms, int | float) or not ms >= 0):
            raise ValueError(f"{ms!r:.40} instead of a time in ms")
        timed.append(((ms or 0.0) * 1000.0, config))
    time_us, config = min(timed, key=lambda item: item[0])
    if time_us == float("inf"):
        raise ValueError("no config ran")
    name, key = path.name.removesuffix(".autotune.json"), document["key"]
    if not isinstance(key, list):
        raise ValueError("a key that is no list")
    kwargs = {name: {"tuple": value} if isinstance(value, list) else value for name, value in config["kwargs"].items()}
    options = {name: config[name] for name in CONFIG_OPTIONS if name in config}
    return ForeignPick(name, tuple(key), _config({**kwargs, **options}), source, time_us or None)


def _config(arguments: Any) -> Config:
    if not isinstance(arguments, dict):
        raise ValueError(f"{str(arguments)[:40]} instead of a config")
    options = {name: arguments[name] for name in CONFIG_OPTIONS if arguments.get(name) is not None}
    for name, value in options.items():
        if type(value) is not int or not 0 < value < 2**31:
            raise ValueError(f"{name} is {str(value)[:40]!r}, not a number above 0")
    return Config({name: value for name, value in arguments.items() if name not in CONFIG_OPTIONS}, **options)


@dataclass(frozen=True)
class _StoredKernel:
    """The contents of the database for one kernel, with the recorded launch of each problem."""

    name: str
    problems: Mapping[Problem, Launch | None]
    recorded: Kernel | None


class RowMaker:
    """Makes rows of configs by the contents of a database. Reads each kernel once."""

    def __init__(self, store: Store, device: str, notice: Notice) -> None:
        """Take the name of the GPU from ``device``, or from the files if it is empty."""
        self._store, self._device, self._notice = store, device, notice
        self._subjects = subjects_of(store.pools())
        self._names = {*store.kernels(), *(problem.kernel for problem in store.recorded_launches())}
        self._stored = functools.cache(self._read)

    def rows(self, picks: Sequence[ForeignPick]) -> list[Row]:
        """Return the rows of all configs that can be stored; one notice for each reason why others cannot."""
        rows: list[Row] = []
        reasons: dict[str, None] = {}
        for pick in picks:
            try:
                rows += self._rows(pick)
            except ValueError as error:
                reasons[f"left out of {pick.source}: {visible(str(error))}"] = None
        for reason in reasons:
            self._notice(reason)
        return rows

    def _rows(self, pick: ForeignPick) -> list[Row]:
        if not pick.kernel:
            raise ValueError("the file does not say which kernel its configs are of: give --kernel")
        kernel = self._stored(pick.kernel)
        row = Row(
            problem=Problem(kernel.name, NamedInts()),
            config=parse_named_ints(str(named_config(pick.config, kernel.recorded))),
            device=self._device_of(pick.device),
            kind=Kind.PUBLISHED,
            outcome=Outcome(Status.OK, pick.time_us),
            source=pick.source[:500],
            process="not timed" if pick.time_us is None else f"figure {pick.time_us!r}",
        )
        problems = [problem for problem, launch in kernel.problems.items() if _is_for(pick, problem, launch)]
        return [replace(row, problem=problem) for problem in problems or [_new_problem(pick, kernel)]]

    def _read(self, text: str) -> _StoredKernel:
        alike = sorted(name for name in self._names if text in (name, name.rpartition(":")[2].rpartition(".")[2]))
        if text not in alike and len(alike) > 1:
            self._notice(f"{visible(text)} may be {' or '.join(alike)}: say which with --kernel")
        name = alike[0] if len(alike) == 1 else text
        if not KERNEL.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no name of a kernel: give --kernel")
        launches = {
            problem: recorded_launch(document) for problem, document in self._store.recorded_launches(name).items()
        }
        problems: dict[Problem, Launch | None] = {problem: launch for problem, (_, launch) in launches.items()}
        tried = (subject.problem for subject in self._subjects if subject.problem.kernel == name)
        recorded = next((kernel for kernel, _ in launches.values()), None)
        return _StoredKernel(name, problems | {problem: problems.get(problem) for problem in tried}, recorded)

    def _device_of(self, text: str) -> Device:
        text = self._device or text
        words = re.findall(r"[A-Za-z0-9]+", text)
        for subject in self._subjects:
            if words and re.findall(r"[A-Za-z0-9]+", subject.device.name) == words:
                return Device(subject.device.arch, subject.device.name)
        return Device(arch_of(text) or UNSTATED, visible(text.replace("_", " "))[:200])


def _is_for(pick: ForeignPick, problem: Problem, launch: Launch | None) -> bool:
    """Return True if a config is for a problem: by all sizes that the file names, or by the recorded key."""
    if pick.dtype and problem.in_dtype not in (pick.dtype, *_FUSED_MOE_DTYPES.get(pick.dtype, ())):
        return False
    if pick.shape:
        return pick.shape.items() <= problem.shape.items()
    return launch is not None and _plain(launch.key) == _plain(pick.key)


def _new_problem(pick: ForeignPick, kernel: _StoredKernel) -> Problem:
    """Return the problem in the file's words. Sizes of a key are named as the recorded key, else ``key_0``.

    Raises:
        ValueError: The file has no sizes that can be stored.
    """
    names = dict(enumerate(kernel.recorded.key if kernel.recorded else ()))
    sizes = {names.get(at, f"key_{at}"): value for at, value in enumerate(pick.key) if type(value) is int}
    shape = pick.shape or NamedInts(sizes)
    for name, size in shape.items():
        if not NAME.fullmatch(name) or size < 0:
            raise ValueError(f"{name}={size} is no size")
    check_sizes(shape)
    dtypes = [value for value in pick.key if isinstance(value, str) and value.startswith("torch.")]
    dtype = pick.dtype or (dtypes[0].removeprefix("torch.") if dtypes else UNSTATED)
    in_dtype = dtype if WORD.fullmatch(dtype) else UNSTATED
    return Problem(kernel.name, shape, UNSTATED, UNSTATED, in_dtype, fp8_dtype="", scale_mode="")


def named_config(config: Config, recorded: Kernel | None) -> NamedInts:
    """Return a config as rows hold it: as the recorded kernel's are, else integers alone, a flag as 0 or 1.

    Raises:
        ValueError: No row can hold a value.
    """
    if recorded is not None:
        values = dict(encoded(recorded, config))
    else:
        flags = {name: int(value) if isinstance(value, bool) else value for name, value in config.kwargs.items()}
        values = {**flags, "num_warps": config.num_warps, "num_stages": config.num_stages}
    # A recorded kernel's rows have these only where one of its own configs sets them.
    values |= {"num_ctas": config.num_ctas} if config.num_ctas != 1 else {}
    values |= {"maxnreg": config.maxnreg} if config.maxnreg is not None else {}
    for name, value in values.items():
        if type(value) is not int:
            raise ValueError(f"{name}={value!r:.40} is no integer: sweep a recording of the kernel first")
    return NamedInts(values)


def _plain(key: Sequence[Any]) -> str:
    """Return a key as text, without ``torch.`` before dtypes."""
    return json.dumps([value.removeprefix("torch.") if isinstance(value, str) else value for value in key])
