"""Files of configs that others made, as published rows: to be measured instead of believed.

A row takes the name, problem and device that the database has for them, so that it stands beside what was measured;
what it has none for keeps the file's own words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8tune.errors import DatabaseError, UsageError
from fp8tune.export.formats import PublishedPick, by_size, fla, huggingface, triton_cache, vllm
from fp8tune.export.formats.documents import bare_name, parsed
from fp8tune.records import Device, Kind, NamedInts, Outcome, Problem, Row, Status
from fp8tune.replay.configs import encoded
from fp8tune.replay.recording import Config, Kernel, Launch, from_json
from fp8tune.store.columns import KERNEL, NAME, UNSTATED, WORD, check_sizes, parse_named_ints
from fp8tune.store.results import Store
from fp8tune.text import visible

Notice = Callable[[str], None]

_ARCHES = {
    "A100": "sm_80",
    "A800": "sm_80",
    "L4": "sm_89",
    "L20": "sm_89",
    "L40": "sm_89",
    "L40S": "sm_89",
    "4090": "sm_89",
    "H20": "sm_90",
    "H100": "sm_90",
    "H200": "sm_90",
    "H800": "sm_90",
    "GH200": "sm_90",
    "B200": "sm_100",
    "GB200": "sm_100",
    "5090": "sm_120",
    "Blackwell": "sm_120",
    "MI250": "gfx90a",
    "MI250X": "gfx90a",
    "MI300X": "gfx942",
    "MI308X": "gfx942",
    "MI325X": "gfx942",
    "MI350X": "gfx950",
    "MI355X": "gfx950",
}
"""A word of a device's name -> its arch: the files name devices alone."""


# Files


def is_foreign(path: Path) -> bool:
    """Whether this is for :func:`picks`: a folder, or a JSON file."""
    return path.is_dir() or path.suffix == ".json"


def picks(path: Path, notice: Notice, kernel: str = "") -> list[PublishedPick]:
    """The picks of a file, or of all files below a folder that are in a format known here.

    ``kernel``: what they are of, whatever the files say. ``notice`` gets a line for each damaged file. Raises
    UsageError where nothing can be read.
    """
    if path.name.endswith(".autotune.json"):
        raise UsageError(f"{visible(str(path))} is one of a Triton cache: give the folder, {visible(str(path.parent))}")
    if path.is_dir():
        found = [*triton_cache.read(path, notice), *_below(path, notice)]
    else:
        found = [replace(pick, source=visible(path.name)) for pick in _of_file(path) or ()]
    if not found:
        raise UsageError(
            f"{visible(str(path))} has no configs that can be read: give a Triton cache, "
            "or JSON of Hugging Face kernels, vLLM, SGLang or flash-linear-attention"
        )
    return [replace(pick, kernel=kernel) for pick in found] if kernel else found


def _below(folder: Path, notice: Notice) -> Iterator[PublishedPick]:
    for path in sorted(folder.rglob("*.json")):
        if path.name.endswith((triton_cache.EVIDENCE, ".autotune.json")) or not path.is_file():
            continue
        try:
            for pick in _of_file(path) or ():
                yield replace(pick, source=visible(f"{folder.name}/{path.relative_to(folder)}"))
        except UsageError as error:
            notice(f"left out: {error}")


def _of_file(path: Path) -> list[PublishedPick] | None:
    """The picks of one JSON file, told by name or content; None for one of another kind."""
    if vllm.is_named(path):
        return vllm.read(path)
    if by_size.is_named(path):
        return huggingface.read(path)
    return fla.read(path) if fla.is_cache(parsed(path)) else None


# Rows


@dataclass(frozen=True)
class _Known:
    """What the database has of one kernel."""

    name: str
    problems: Sequence[Problem] = ()
    recorded: Kernel | None = None
    launches: Mapping[Problem, Launch] | None = None


class Rows:
    """Makes rows of picks, by what a database knows; reads each kernel once."""

    def __init__(self, store: Store, device: str, notice: Notice) -> None:
        """``device``: the name of the GPU, whatever the files say; empty for what they say."""
        self._store, self._device, self._notice = store, device, notice
        self._subjects = store.tried_subjects()
        self._names = {*store.kernels(), *(problem.kernel for problem in store.recorded_launches())}
        self._known: dict[str, _Known] = {}

    def of(self, picks: Collection[PublishedPick]) -> list[Row]:
        """The rows of all picks that can be stored; a line for each reason why some of a file cannot."""
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

    def _rows(self, pick: PublishedPick) -> list[Row]:
        known = self._kernel(pick.kernel)
        config = named_config(pick.config, known.recorded)
        problems = [problem for problem in known.problems if _is_of(pick, problem, known)]
        row = Row(
            problem=Problem(known.name, NamedInts()),
            config=parse_named_ints(str(config)),  # raises ValueError for what no row holds
            device=self._device_of(pick.device),
            kind=Kind.PUBLISHED,
            outcome=Outcome(Status.OK, pick.time_us),
            source=pick.source[:500],
            process=f"figure {pick.time_us!r}" if pick.time_us is not None else "not timed",
        )
        return [replace(row, problem=problem) for problem in problems or [_own_problem(pick, known)]]

    def _kernel(self, name: str) -> _Known:
        if not name:
            raise ValueError("the file does not say which kernel its configs are of: give --kernel")
        if name not in self._known:
            alike = [each for each in self._names if name in (each, bare_name(each))]
            if name not in alike and len(alike) > 1:
                self._notice(f"{visible(name)} may be {' or '.join(sorted(alike))}: say which with --kernel")
            self._known[name] = self._read(alike[0] if len(alike) == 1 else name)
        return self._known[name]

    def _read(self, name: str) -> _Known:
        if not KERNEL.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no name of a kernel: give --kernel")
        texts = self._store.recorded_launches(name)
        try:
            documents = {problem: json.loads(text) for problem, text in texts.items()}
            launches = {problem: from_json(document["launch"], Launch) for problem, document in documents.items()}
            recorded = next((from_json(document["kernel"], Kernel) for document in documents.values()), None)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DatabaseError(
                f"a recorded launch of {name} is damaged ({error}): record and sweep it again"
            ) from None
        tried = [subject.problem for subject in self._subjects if subject.problem.kernel == name]
        return _Known(name, tuple(dict.fromkeys([*launches, *tried])), recorded, launches)

    def _device_of(self, name: str) -> Device:
        name = self._device or name
        words = _words(name)
        for subject in self._subjects:
            if words and _words(subject.device.name) == words:
                return Device(subject.device.arch, subject.device.name)
        arch = next((_ARCHES[word] for word in words if word in _ARCHES), UNSTATED)
        return Device(arch, visible(name.replace("_", " "))[:200])


def named_config(config: Config, recorded: Kernel | None) -> NamedInts:
    """A config as rows hold it: as the recorded kernel's are, else integers alone, a flag as 0 or 1.

    Raises ValueError for a value that no row can hold.
    """
    if recorded is not None:
        named = dict(encoded(recorded, config))
    else:
        flags = {name: int(value) if isinstance(value, bool) else value for name, value in config.kwargs.items()}
        named = {**flags, "num_warps": config.num_warps, "num_stages": config.num_stages}
    # a recorded kernel's rows have these only where one of its own configs sets them
    named |= {"num_ctas": config.num_ctas} if config.num_ctas != 1 else {}
    named |= {"maxnreg": config.maxnreg} if config.maxnreg is not None else {}
    for name, value in named.items():
        if type(value) is not int:
            raise ValueError(f"{name}={value!r:.40} is no integer: sweep a recording of the kernel first")
    return NamedInts(named)


def _is_of(pick: PublishedPick, problem: Problem, known: _Known) -> bool:
    """Whether a pick is for a problem: by the recorded key, or by all sizes that the file names."""
    if pick.dtype and pick.dtype not in (problem.in_dtype, vllm.DTYPES.get(problem.in_dtype)):
        return False
    if pick.shape:
        return pick.shape.items() <= problem.shape.items()
    launch = (known.launches or {}).get(problem)
    return launch is not None and _plain(launch.key) == _plain(pick.key)


def _own_problem(pick: PublishedPick, known: _Known) -> Problem:
    """What the file says of the problem, where the database has none like it. Raises ValueError where it has no size.

    Sizes of a key are named as the recorded kernel's key is, else ``key_0`` and so on.
    """
    names = known.recorded.key if known.recorded else ()
    sizes = {
        names[place] if place < len(names) else f"key_{place}": value
        for place, value in enumerate(pick.key)
        if type(value) is int
    }
    shape = pick.shape or NamedInts(sizes)
    for name, size in shape.items():
        if not NAME.fullmatch(name) or size < 0:
            raise ValueError(f"{name}={size} is no size")
    check_sizes(shape)
    dtypes = [value for value in pick.key if isinstance(value, str) and value.startswith("torch.")]
    dtype = pick.dtype or (dtypes[0].removeprefix("torch.") if dtypes else UNSTATED)
    in_dtype = dtype if WORD.fullmatch(dtype) else UNSTATED
    return Problem(known.name, shape, UNSTATED, UNSTATED, in_dtype, fp8_dtype="", scale_mode="")


def _plain(key: Sequence[Any]) -> str:
    """A key as text, whether its dtypes say ``torch.`` or not."""
    return json.dumps([value.removeprefix("torch.") if isinstance(value, str) else value for value in key])


def _words(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[A-Za-z0-9]+", name))
