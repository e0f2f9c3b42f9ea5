"""Check of folders with tuned JSON files of vLLM, SGLang and Hugging Face kernels, without a GPU or their code."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from fp8tune.check.findings import Finding, Level
from fp8tune.check.machine import installed_version, release
from fp8tune.errors import UsageError, one_line
from fp8tune.importing.foreign import LARGEST_BYTES
from fp8tune.stats.means import group_by
from fp8tune.tables.tuned_files import RULES, SGLANG_MOE, FileName, Rule, arch_of, launch_options, vllm_lora_device
from fp8tune.text import visible
from fp8tune_kernels.arches import ARCHES

WIDEST_GAP = 4
"""Ratio of neighbouring sizes beyond which they leave a gap. The tuners of vLLM and SGLang double the size, or less."""

NEAR_COPY = 0.9  # share of equal configs

_RETUNE = "see on which device they were tuned, and tune them on the others"

_HF = Rule("HF kernels", "any kernel", (), {}, required=())
_OTHER = Rule("", "other layout", (), {}, required=())  # sizes are further inside, and nothing is checked


class Problem(StrEnum):
    """Problem of a tuned file."""

    NO_MATCH = "no match"  # the consumer's lookup never opens it
    DAMAGED = "damaged"  # the lookup, or a launch with an entry of it, fails
    NO_LAUNCH = "no launch"  # the GPU cannot launch a config
    HIDDEN = "hidden"  # a file of the same name in another Triton's folder is opened instead
    OLD_TRITON = "old Triton"  # tuned with an older Triton than the one that is installed
    NO_TRITON = "no Triton"  # nothing says which Triton it was tuned with
    GAP = "gap"  # sizes in a wide range take the config of a far one
    COPY = "copy"  # all configs are those of another device or Triton version
    NEAR_COPY = "near copy"  # nearly all configs are those of another device


ERRORS = (Problem.NO_MATCH, Problem.DAMAGED, Problem.NO_LAUNCH)


@dataclass(frozen=True)
class FileProblem:
    """One problem of one file."""

    problem: Problem
    text: str
    fix: str


@dataclass
class TunedFile:
    """A tuned file, with what is wrong with it."""

    path: str  # below the folder
    rule: Rule
    name: FileName
    device: str
    triton: str = ""
    configs: dict[int, dict[str, Any] | None] = field(default_factory=dict)
    problems: list[FileProblem] = field(default_factory=list)

    @property
    def arch(self) -> str:
        """Arch of the device; empty if it is unknown."""
        return arch_of(self.device)

    def add(self, problem: Problem, text: str, fix: str) -> None:
        """Add a problem."""
        self.problems.append(FileProblem(problem, text, fix))


def check_folder(folder: Path, triton: str | None = None) -> tuple[list[TunedFile], list[Finding]]:
    """Check all tuned files below a folder.

    Args:
        folder: The folder.
        triton: Version of Triton that files should be tuned with; that of this environment by default.

    Raises:
        UsageError: There is no such folder, or it has no tuned files.
    """
    if not folder.is_dir():
        raise UsageError(f"--configs {visible(str(folder))} is no folder: name one with tuned JSON files")
    paths = sorted(path for path in folder.rglob("*.json") if path.is_file())
    tuned = [path for path in paths if _is_tuned(path.stem)]
    if not tuned:
        raise UsageError(f"{visible(str(folder))} has no tuned files: name the folder of vLLM's or SGLang's configs")
    here = installed_version("triton") if triton is None else triton
    files = []
    for _, group in sorted(group_by(tuned, lambda path: path.parent).items()):
        consumer = _consumer(group)
        files += [_read(path, folder, consumer) for path in group]
    for file in files:
        _check_name(file)
        _check_version(file, here)
        _check_gaps(file)
        _check_launches(file)
    _find_hidden(files, here)
    _find_copies(files)
    return files, [*_findings(files, len(paths) - len(tuned))]


def _is_tuned(stem: str) -> bool:
    return bool(FileName.parse(stem).device or re.match(r"E=\d+,N=|N=\d+,K=", stem) or vllm_lora_device(stem))


def _consumer(paths: Sequence[Path]) -> str:
    """Return the program that reads the files of one folder, by the folder and by how most names are spelled."""
    folder = paths[0].resolve().parent
    named = [part for part in folder.parts if part in ("vllm", "sglang")]
    if named:
        return "vLLM" if named[-1] == "vllm" else "SGLang"
    if folder.name.startswith("triton_") or any(folder.glob("triton_*/")):
        return "SGLang"
    names = [FileName.parse(path.stem) for path in paths]
    blocks = Counter(", " in name.fields["block_shape"] for name in names if "block_shape" in name.fields)
    if blocks[True] > blocks[False] or any(SGLANG_MOE.is_like(name) and name.is_down for name in names):
        return "SGLang"
    is_known = any(rule.consumer == "vLLM" and rule.is_like(name) for rule in RULES for name in names)
    return "vLLM" if is_known or any(vllm_lora_device(path.stem) for path in paths) else _HF.consumer


def _read(path: Path, folder: Path, consumer: str) -> TunedFile:
    name = FileName.parse(path.stem)
    rules = [rule for rule in RULES if rule.consumer == consumer and rule.is_like(name)]
    rule = next((rule for rule in rules if not rule.mismatch(name)[0]), rules[0] if rules else _HF)
    device = name.device or vllm_lora_device(path.stem)
    file = TunedFile(visible(str(path.relative_to(folder))), rule, name, visible(device))
    if rule.version == "folder" and path.parent.name.startswith("triton_"):
        file.triton = path.parent.name.removeprefix("triton_").replace("_", ".")
    elif rule.version == "folder":
        file.add(Problem.NO_MATCH, "the lookup only reads folders named triton_X_Y_Z", "move it into such a folder")
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise ValueError(f"larger than {LARGEST_BYTES >> 20} MiB")
        entries = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=tuple
        )  # a dict would drop repeated keys
        if not isinstance(entries, tuple):
            raise ValueError("no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        file.add(Problem.DAMAGED, visible(one_line(error)), "write the file again")
        return file
    sized = [key for key, _ in entries if re.fullmatch(r"[0-9]{1,18}", key)]
    if rule is _HF and (consumer != _HF.consumer or not sized):  # layouts that hold their sizes further inside
        file.rule = replace(_OTHER, consumer=consumer)
        return file
    for key, value in entries:
        _read_entry(file, key, value)
    return file


def _read_entry(file: TunedFile, key: str, value: Any) -> None:
    rule = file.rule
    if key == "triton_version" and rule.version == "entry" and isinstance(value, str):
        file.triton = value
        return
    fault, fix = "", "correct the entry, or remove it"
    config = dict(value) if isinstance(value, tuple) else None
    numbers = {} if config is None else {name: number for name, number in config.items() if type(number) is int}
    tiles = {name: number for name, number in numbers.items() if name.startswith("BLOCK_SIZE_")}
    known = {*rule.required, *rule.optional, *launch_options(file.arch)}
    if not re.fullmatch(r"[0-9]{1,18}", key):
        fault = "is no size, and the lookup fails" if rule is not _HF else "is no size"
    elif int(key) in file.configs:
        fault = "is there twice, and the last one counts"
    elif config is None and not (value is None and rule.may_be_null):
        fault = f"is {visible(str(value))[:40]} instead of a config"
    elif config is not None and rule is not _HF:
        missing = [name for name in rule.required if name not in numbers]
        unknown = [name for name in config if name not in known and "BLOCK_SIZE_K" in rule.required]
        odd = [name for name, number in tiles.items() if number < 1 or number & (number - 1)]
        few = [name for name in ("num_warps", "GROUP_SIZE_M") if numbers.get(name, 1) < 1]
        if missing:
            fault = f"lacks {missing[0]}, which the kernel needs"
        elif unknown:
            fault = f"has {unknown[0]}, which neither the kernel nor the compiler takes"
        elif odd:
            fault = f"has {odd[0]}={tiles[odd[0]]}, which is no power of two"
        elif few:
            fault = f"has {few[0]}={numbers[few[0]]}, less than 1"
    if fault:
        file.add(Problem.DAMAGED, f"{visible(key)[:40]!r} {fault}", fix)
    if re.fullmatch(r"[0-9]{1,18}", key) and (config is not None or value is None):
        file.configs[int(key)] = config


def _check_name(file: TunedFile) -> None:
    if device := vllm_lora_device(str(file.name)):
        if (expected := re.sub(r"[ -]", "_", device)) != device:
            file.add(Problem.NO_MATCH, f"the lookup calls {device} {expected}", f"call the device {expected}")
    elif not file.rule.fields:
        if " " in file.device:
            file.add(Problem.NO_MATCH, "lookups write _ for blanks in a device's name", "write _ for blanks")
    else:
        reason, fix = file.rule.mismatch(file.name)
        if reason:
            file.add(Problem.NO_MATCH, visible(reason), visible(fix))


def _check_version(file: TunedFile, here: str) -> None:
    if not file.configs or (file.rule.version == "folder" and not file.triton):
        return  # of another layout, damaged as a whole, or in no Triton's folder
    if not file.triton:
        # Lookups without a place for the version take every entry for a size.
        fix = "add an entry triton_version" if file.rule.version == "entry" else "note the version beside the files"
        file.add(Problem.NO_TRITON, "the Triton version is not recorded", fix)
    elif here and release(file.triton) < release(here):
        file.add(Problem.OLD_TRITON, f"tuned with Triton {file.triton}, you have {here}", f"tune it with Triton {here}")


def _check_gaps(file: TunedFile) -> None:
    sizes = sorted(file.configs)
    if not sizes:
        return
    ends = file.rule.ladder or (sizes[0], sizes[-1])
    steps = sorted({*sizes, *ends})
    wide = [(low, high) for low, high in pairwise(steps) if high > WIDEST_GAP * max(low, 1)]
    if wide:
        low, high = max(wide, key=lambda step: step[1] / max(step[0], 1))
        place = (
            f"below {high}" if low not in sizes else f"above {low}" if high not in sizes else f"from {low} to {high}"
        )
        text = f"no size {place}: sizes there take the config of the nearest"
        file.add(Problem.GAP, text, "tune sizes in the gap, at most a factor of 4 apart")


_OPERAND_BYTES = {"": (2, 2), "fp8_w8a16": (2, 1), "int8_w8a16": (2, 1), "int4_w4a16": (2, 0), "float32": (4, 4)}
_OPERAND_BYTES |= dict.fromkeys(("fp8_w8a8", "int8_w8a8", "fp8_w8a8_channelwise"), (1, 1))
"""Dtype -> bytes of an element of the activations and of the weights, 0 where several share a byte."""


def _check_launches(file: TunedFile) -> None:
    limits, element_bytes = ARCHES.get(file.arch), _OPERAND_BYTES.get(file.name.dtype)
    if limits is None or "BLOCK_SIZE_K" not in file.rule.required or element_bytes is None:
        return
    for size, config in file.configs.items():
        numbers = {name: value for name, value in (config or {}).items() if type(value) is int}
        if not {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K"} <= {*numbers}:
            continue
        block = file.name.block_shape
        if block and file.rule.consumer == "vLLM":  # it cuts the tile so that one scale covers it
            numbers["BLOCK_SIZE_K"] = min(numbers["BLOCK_SIZE_K"], *block)
        threads = numbers.get("num_warps", 4) * limits.warp_size
        needed, fault = shared_bytes(numbers, file.arch, element_bytes), ""
        if threads > limits.max_threads_per_block:
            fault = f"{threads} threads a block, {file.arch} has at most {limits.max_threads_per_block}"
        elif needed > limits.shared_bytes_per_block:
            fault = f"needs {needed} bytes of shared memory, {file.arch} has {limits.shared_bytes_per_block}"
        elif limits.backend == "cuda" and element_bytes == (1, 1) and numbers["BLOCK_SIZE_K"] < 32:
            fault = f"BLOCK_SIZE_K={numbers['BLOCK_SIZE_K']}, tensor cores take 32 or more of 8 bits"
        if fault:
            file.add(Problem.NO_LAUNCH, f"{size}: {fault}", "tune that size again on the device")


def shared_bytes(config: Mapping[str, int], arch: str, element_bytes: tuple[int, int]) -> int:
    """Return the least shared memory that Triton gives to the operands of a GEMM, as its compiler states it.

    One stage is in flight to registers. Tensor cores of sm_90 and sm_100 read tiles of 64 rows from shared memory,
    which keeps one stage more, if no operand is converted first.
    """
    rows, columns, depth = (config[f"BLOCK_SIZE_{dim}"] for dim in "MNK")
    sides = (rows * depth * element_bytes[0], columns * depth * element_bytes[1])
    is_amd, is_converted = arch.startswith("gfx"), element_bytes[0] != element_bytes[1]
    stages = config.get("num_stages", 2 if is_amd else 3)
    if stages < 2:
        return max(sides) if is_amd else 0 if is_converted else sum(sides)
    reads_shared = arch in ("sm_90", "sm_100") and rows >= 64 and config.get("num_warps", 4) % 4 == 0
    return sum(sides) * (stages if reads_shared and not is_converted else stages - 1)


def _find_hidden(files: Iterable[TunedFile], here: str) -> None:
    in_folders = [file for file in files if file.rule.version == "folder" and file.triton]
    for group in group_by(in_folders, lambda file: (file.rule.kernel, str(file.name))).values():
        newest = max(group, key=lambda file: release(file.triton))
        opened = next((file for file in group if file.triton == here), newest)
        for file in group:
            if file is not opened:
                text = f"Triton {here or opened.triton} reads the file of triton_{opened.triton.replace('.', '_')}"
                file.add(Problem.HIDDEN, text, "nothing, or remove it: only Triton of its own version opens it")


def _find_copies(files: Iterable[TunedFile]) -> None:
    def shape(file: TunedFile) -> tuple[object, ...]:
        fields = [item for item in file.name.fields.items() if item[0] not in ("device", "device_name")]
        return (file.rule.consumer, file.rule.kernel, file.name.is_down, *sorted(fields))

    for group in group_by((file for file in files if file.configs), shape).values():
        for file in group:
            peers = [peer for peer in group if (peer.device, peer.triton) != (file.device, file.triton)]
            equal = next((peer for peer in peers if peer.configs == file.configs), None)
            elsewhere = [peer for peer in peers if peer.device != file.device]
            share, near = max(((_share(file, peer), peer.device) for peer in elsewhere), default=(0.0, ""))
            if equal:
                where = equal.device if equal.device != file.device else f"Triton {equal.triton or '(unknown)'}"
                file.add(Problem.COPY, f"all {len(file.configs)} configs are those of {where}", _RETUNE)
            elif share >= NEAR_COPY:
                file.add(Problem.NEAR_COPY, f"{share:.0%} of the configs are those of {near}", _RETUNE)


def _share(file: TunedFile, peer: TunedFile) -> float:
    """Return the share of equal configs; 0 for files of other sizes."""
    if {*peer.configs} != {*file.configs}:
        return 0.0
    return sum(config == peer.configs[size] for size, config in file.configs.items()) / len(file.configs)


def _findings(files: Sequence[TunedFile], skipped: int) -> Iterator[Finding]:
    counts = Counter(f"{file.rule.consumer} {file.rule.kernel}" for file in files)
    configs = sum(len(file.configs) for file in files)
    rest = f"; {skipped} JSON files skipped" if skipped else ""
    parts = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    yield Finding(Level.OK, f"{len(files)} tuned files with {configs:,} configs: {parts}{rest}")
    problems = [(file, item) for file in files for item in file.problems]
    for (problem, fix), group in group_by(problems, lambda pair: (pair[1].problem, pair[1].fix)).items():
        paths, (first, item) = {file.path for file, _ in group}, group[0]
        text = f"{_TITLES[problem].format(files='1 file' if len(paths) == 1 else f'{len(paths)} files')}: {item.text}"
        text += f" ({'in' if len(paths) == 1 else 'first:'} {Path(first.path).name})"
        yield Finding(Level.ERROR if problem in ERRORS else Level.WARNING, text, fix)


_TITLES = {
    Problem.NO_MATCH: "{files} that no lookup opens",
    Problem.DAMAGED: "{files} with damaged entries",
    Problem.NO_LAUNCH: "{files} with configs that cannot be launched",
    Problem.HIDDEN: "{files} behind one of another Triton",
    Problem.OLD_TRITON: "{files} of an older Triton",
    Problem.NO_TRITON: "{files} of an unknown Triton",
    Problem.GAP: "{files} with gaps between sizes",
    Problem.COPY: "{files} with the configs of another",
    Problem.NEAR_COPY: "{files} with nearly the configs of another",
}
