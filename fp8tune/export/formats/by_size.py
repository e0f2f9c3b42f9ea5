"""Files whose names say sizes and the device, and that map one more size to a config.

``N=4096,K=4096,device_name=NVIDIA_H200.json`` holds ``{"1024": {"BLOCK_SIZE_M": 64, ..., "num_warps": 4}}``. Hugging
Face's example, vLLM and SGLang read such files, each with its own sizes; see their modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from fp8tune.errors import UsageError
from fp8tune.export.formats import PublishedPick
from fp8tune.export.formats.compromise import least_worst
from fp8tune.export.formats.documents import config_of, evidence, flat, parsed, text_of
from fp8tune.export.given import File, Given, Tuned
from fp8tune.records import NamedInts, Problem
from fp8tune.text import NAME, visible

EVIDENCE = ".evidence.json"
"""The end of the name of the file beside: the readers take every key of their own file for a size."""

SIZE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}=[0-9]{1,19}")

Sizes = Mapping[str, str | int]
"""A size's name in the format -> the dim of the kernel that it is, or its value where no dim has it."""


def sizes(texts: Iterable[str]) -> dict[str, str | int]:
    """What ``M=num_tokens`` and ``E=8`` say. Raises UsageError for another text."""
    found: dict[str, str | int] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not NAME.fullmatch(name) or not (NAME.fullmatch(value) or re.fullmatch(r"[0-9]{1,18}", value)):
            raise UsageError(
                f"--size {visible(text)!r} is no size: give NAME=DIM or NAME=NUMBER, such as M=num_tokens or E=8"
            )
        found[name] = int(value) if value.isdigit() else value
    return found


@dataclass(frozen=True)
class Table:
    """One file: what its name says, and the problems of each size inside."""

    sizes: NamedInts
    dtype: str
    inside: Mapping[int, Sequence[Tuned]] = field(default_factory=dict)


def size_of(problem: Problem, name: str, sizes: Sizes) -> int:
    """A problem's size by the format's name for it. Raises UsageError where it has none."""
    wanted = sizes.get(name, name)
    if isinstance(wanted, int):
        return wanted
    if wanted in problem.shape:
        return problem.shape[wanted]
    dims = ", ".join(problem.shape)
    raise UsageError(
        f"{problem.kernel} has no dim {wanted}, which this format needs: its dims are {dims}; "
        f"give --size {name}=DIM or --size {name}=NUMBER"
    )


def tables(tuned: Sequence[Tuned], outside: Sequence[str], inside: str, sizes: Sizes, dtypes: bool) -> list[Table]:
    """The problems by file and by the size inside, both rising. ``dtypes``: one file for each input dtype."""
    found: dict[tuple[tuple[int, ...], str], dict[int, list[Tuned]]] = {}
    for one in tuned:
        values = tuple(size_of(one.problem, name, sizes) for name in outside)
        dtype = one.problem.in_dtype if dtypes else ""
        by_size = found.setdefault((values, dtype), {})
        by_size.setdefault(size_of(one.problem, inside, sizes), []).append(one)
    return [
        Table(NamedInts(list(zip(outside, values, strict=True))), dtype, dict(sorted(by_size.items())))
        for (values, dtype), by_size in sorted(found.items(), key=lambda item: item[0])
    ]


def files(given: Given, path: PurePosixPath, table: Table, head: Mapping[str, object] | None = None) -> list[File]:
    """The file of one table, and the one beside it with the evidence of each pick."""
    configs: dict[str, object] = dict(head or {})
    notes: dict[str, object] = {}
    for size, tuned in table.inside.items():
        config, worst = least_worst(tuned)
        configs[str(size)] = flat(given.kernel, given.configs[config])
        notes[str(size)] = {"worst_slowdown": round(worst, 4), "problems": [evidence(one) for one in tuned]}
    beside = {"kernel": given.kernel, "device": given.device.name, "triton": given.device.triton, "entries": notes}
    return [File(path, text_of(configs)), File(path.with_name(path.stem + EVIDENCE), text_of(beside))]


def is_named(path: Path) -> bool:
    """Whether a file is named as one of these formats names its files."""
    return "device_name=" in path.name and path.suffix == ".json" and not path.name.endswith(EVIDENCE)


def read(path: Path, kernel: str = "", inside: str = "M") -> list[PublishedPick]:
    """The picks of a file of any of these formats. Raises UsageError naming the file for a damaged one."""
    shape, device, dtype = _from_name(path)
    document = parsed(path)
    try:
        if not isinstance(document, dict):
            raise ValueError(f"{type(document).__name__} instead of sizes and configs")
        picks = []
        for size, arguments in document.items():
            if size == "triton_version":
                continue
            if not re.fullmatch(r"[0-9]{1,19}", size):
                raise ValueError(f"{size[:40]!r} is no size")
            sizes = NamedInts({**shape, inside: int(size)})
            key = (*sizes.values(), dtype) if dtype else tuple(sizes.values())
            picks.append(
                PublishedPick(
                    kernel, key, config_of(arguments), None, path.name, shape=sizes, device=device, dtype=dtype
                )
            )
        return picks
    except ValueError as error:
        raise UsageError(f"{visible(str(path))} is damaged: {visible(str(error))}") from None


def _from_name(path: Path) -> tuple[NamedInts, str, str]:
    """The sizes, the device and the dtype that a file's name says. Flags are sizes of 1."""
    stem, down, _ = path.stem.rpartition("_down") if path.stem.endswith("_down") else (path.stem, "", "")
    shape: dict[str, int] = {}
    named: dict[str, str] = {}
    for part in re.split(r",(?![^\[]*\])", stem):
        name, _, value = part.partition("=")
        if SIZE.fullmatch(part):
            shape[name] = int(value)
        elif value == "True":
            shape[name] = 1
        elif block := re.fullmatch(r"block_shape=\[(\d{1,9}), ?(\d{1,9})\]", part):
            shape |= {"block_n": int(block[1]), "block_k": int(block[2])}
        else:
            named.setdefault(name, value)
    if down:
        shape["down"] = 1
    return NamedInts(shape), named.get("device_name", ""), named.get("dtype", "")
