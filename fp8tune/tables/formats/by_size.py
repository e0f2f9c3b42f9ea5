"""JSON files that map one size to configs, for Hugging Face kernels, vLLM and SGLang.

The file name has the other sizes and the device. Hugging Face kernels choose these sizes (see triton-autotune.md of
huggingface/kernels). SGLang has a folder for each Triton version where vLLM has an entry ``triton_version``.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TypeVar

from fp8tune.errors import UsageError
from fp8tune.tables.files import File
from fp8tune.tables.formats import Format, Options
from fp8tune.tables.formats.moe_defaults import LADDER, Default, sglang_default, vllm_default
from fp8tune.tables.picks import KernelPicks, Pick, shared_config
from fp8tune.tables.tuned_files import SGLANG_MOE, TILE, VLLM_MOE, Rule, launch_options

DTYPES = {"bfloat16": "", "float16": "", "float32": "float32", "int8": "int8_w8a8"}
DTYPES |= dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz"), "fp8_w8a8")
"""Mapping from the dtype of the activations to its name in the file names of vLLM and SGLang."""

_LEADING_SIZES = ("E", "N", "K")  # sizes that come first in Hugging Face's file names
_Place = TypeVar("_Place")


def write_hugging_face(kernels: Sequence[KernelPicks], options: Options) -> list[File]:
    """Return a file for each combination of the sizes in the file name, in a folder named after the kernel."""
    (kernel,) = kernels
    size = functools.partial(_size, options=options)
    first, *others = (pick.problem.shape for pick in kernel.picks)
    dims = [dim for dim in first if all(dim in shape for shape in others)]
    dims = [dim for dim in dims if kernel.recorded and dim in kernel.recorded.key] or dims
    renamed = {dim: name for name, dim in options.sizes.items() if isinstance(dim, str)}
    names = list(dict.fromkeys([*(renamed.get(dim, dim) for dim in dims), *options.sizes]))
    if not names:
        raise UsageError(f"the problems of {kernel.kernel} have no dim in common: use --for python")
    inside = "M" if "M" in names else max(names, key=lambda name: len({size(pick, name) for pick in kernel.picks}))
    outside = sorted((name for name in names if name != inside), key=lambda name: [*_LEADING_SIZES, name].index(name))
    has_dtypes = len({pick.problem.in_dtype for pick in kernel.picks}) > 1

    def path(pick: Pick) -> PurePosixPath:
        parts = [*(f"{name}={size(pick, name)}" for name in outside), f"device_name={_device_name(kernel)}"]
        parts += [f"dtype={pick.problem.in_dtype}"] if has_dtypes else []
        return PurePosixPath(_safe_name(kernel.bare_name), _safe_name(",".join(parts)) + ".json")

    return [
        _file(name, {}, {size: _json_config(kernel, picks) for size, picks in by_size.items()})
        for name, by_size in _by_file(kernel, options, inside, path)
    ]


def write_vllm(kernels: Sequence[KernelPicks], options: Options) -> list[File]:
    """Return vLLM's fused-MoE files, one for each combination of E, N and dtype."""
    head = {"triton_version": kernels[0].device.triton}
    return _write_fused_moe(kernels[0], options, VLLM_MOE, vllm_default, PurePosixPath(), head)


def write_sglang(kernels: Sequence[KernelPicks], options: Options) -> list[File]:
    """Return SGLang's fused-MoE files, one for each combination of E, N and dtype, in the Triton version's folder."""
    version = _safe_name(kernels[0].device.triton).replace(".", "_")
    folder = PurePosixPath("configs", f"triton_{version}")
    return _write_fused_moe(kernels[0], options, SGLANG_MOE, sglang_default, folder, {})


def _write_fused_moe(
    kernel: KernelPicks, options: Options, rule: Rule, default: Default, folder: PurePosixPath, head: Mapping[str, str]
) -> list[File]:
    if missing := [name for name in TILE for pick in kernel.picks if name not in pick.config]:
        raise UsageError(f"{kernel.kernel} has no {missing[0]}, which fused-MoE kernels have: use --for python")
    dims = {*options.sizes, *(dim for pick in kernel.picks for dim in pick.problem.shape)}
    has_blocks = dims.issuperset(("block_n", "block_k"))
    _device_name(kernel)  # refuses a device without one

    def place(pick: Pick) -> tuple[PurePosixPath, int, str, tuple[int, int] | None]:
        """Return the file of a pick, and what the consumer's default config depends on."""
        dtype = options.sizes.get("dtype", DTYPES.get(pick.problem.in_dtype))
        if not isinstance(dtype, str):
            advice = "give --size dtype=NAME, such as fp8_w8a8"
            raise UsageError(f"vLLM has no name for the dtype {pick.problem.in_dtype}: {advice}")
        experts, columns = (_size(pick, name, options) for name in "EN")
        block = (_size(pick, "block_n", options), _size(pick, "block_k", options)) if has_blocks else None
        values = {"E": experts, "N": columns, "dtype": dtype, "block_shape": block}
        name = _safe_name(str(rule.file_name(values, kernel.device.name)))
        return folder / f"{name}.json", experts, dtype, block

    files, pinned, unknown = [], set[int](), set[int]()
    for (path, experts, dtype, block), by_size in _by_file(kernel, options, "M", place):
        entries = {size: _moe_config(kernel, picks, rule, options) for size, picks in by_size.items()}
        for tokens in sorted({*LADDER} - {*entries}):
            # The consumer takes the nearest key, however far it is. Its tuner's steps are at most a factor of 2.
            near = min(by_size, key=lambda size: max(size, tokens) / max(1, min(size, tokens)))
            if max(near, tokens) <= 2 * min(near, tokens):
                entries[tokens] = entries[near]
            elif (config := default(tokens, experts, dtype, block, kernel.device.arch)) is not None:
                entries[tokens] = {**config}
                pinned.add(tokens)
            else:
                unknown.add(tokens)
        files.append(_file(path, head, entries))
    for sizes, text in ((pinned, "is written for"), (unknown, "is unknown for")):
        if sizes:
            listed = ", ".join(map(str, sorted(sizes)))
            options.notice(f"{rule.consumer}'s default {text} M = {listed}, far from all swept: sweep these")
    return files


def _moe_config(kernel: KernelPicks, picks: Sequence[Pick], rule: Rule, options: Options) -> dict[str, object]:
    """Return the config of a size, with all constants that the consumer's kernel takes, and no others."""
    config, launch = _json_config(kernel, picks), picks[0].launch
    constants = {**(launch.scalars if launch else {}), **options.sizes}
    group, split = config.pop("GROUP_SIZE_M", constants.get("GROUP_SIZE_M")), config.pop("SPLIT_K", 1)
    if not isinstance(group, int):
        group = 1
        options.notice("GROUP_SIZE_M=1 is written, which no config has: name another with --size GROUP_SIZE_M=8")
    config = {**{name: config.pop(name) for name in TILE}, "GROUP_SIZE_M": group, **config}
    if "SPLIT_K" in rule.optional:
        config["SPLIT_K"] = split
    known = {*rule.required, *rule.optional, *launch_options(kernel.device.arch)}
    refused = next((name for name in config if name not in known), "" if split == 1 else f"SPLIT_K={split}")
    if refused:
        reason = f"{kernel.kernel} sets {refused}, which the kernel of {rule.consumer} does not take"
        raise UsageError(f"{reason}: use --for python")
    return config


def _by_file(
    kernel: KernelPicks, options: Options, inside: str, place: Callable[[Pick], _Place]
) -> list[tuple[_Place, dict[int, list[Pick]]]]:
    """Return the picks of each file by the size inside it."""
    groups: dict[_Place, dict[int, list[Pick]]] = {}
    for pick in kernel.picks:
        groups.setdefault(place(pick), {}).setdefault(_size(pick, inside, options), []).append(pick)
    return sorted(groups.items(), key=lambda item: str(item[0]))


def _file(path: PurePosixPath, head: Mapping[str, str], entries: Mapping[int, object]) -> File:
    document = {**head, **{str(size): config for size, config in sorted(entries.items())}}
    return File(path, json.dumps(document, indent=4, allow_nan=False) + "\n")


def _json_config(kernel: KernelPicks, picks: Sequence[Pick]) -> dict[str, object]:
    """Return one config. Picks with the same file and size get that whose worst slowdown is smallest."""
    config = kernel.triton_config(shared_config(picks))
    if config.has_pre_hook or any(isinstance(value, Mapping) for value in config.kwargs.values()):
        problem = "a pre_hook" if config.has_pre_hook else "values that JSON does not have"
        raise UsageError(f"configs of {kernel.kernel} have {problem}: export --for python, and use fp8tune.pin")
    return {**config.kwargs, **config.options}


def _size(pick: Pick, name: str, options: Options) -> int:
    dim, shape = options.sizes.get(name, name), pick.problem.shape
    if isinstance(dim, int):
        return dim
    dim, _, divisor = dim.partition("/")
    if dim not in shape:
        raise UsageError(f"{pick.problem.kernel} has no dim {dim}, only {', '.join(shape)}: give --size {name}=DIM")
    if shape[dim] % int(divisor or 1):
        raise UsageError(f"{dim}={shape[dim]} is no multiple of {divisor}: correct --size {name}={dim}/{divisor}")
    return shape[dim] // int(divisor or 1)


def _device_name(kernel: KernelPicks) -> str:
    if not kernel.device.name:
        raise UsageError("the database does not name the device, as the format's file names do: sweep on the GPU")
    return _safe_name(kernel.device.name.replace(" ", "_"))


def _safe_name(text: str) -> str:
    """Return the text with unusual characters replaced by ``_``. The file stays in its folder and is not hidden."""
    return re.sub(r"[^A-Za-z0-9_.,=()\[\] +-]+", "_", text).lstrip(".")[:200] or "_"


HUGGING_FACE = Format(
    write_hugging_face, "put the folder's files into the kernel's configs, as the Hub's kernels load them", ("sizes",)
)
VLLM = Format(write_vllm, "set VLLM_TUNED_CONFIG_FOLDER={folder}", ("sizes",))
SGLANG = Format(write_sglang, "set SGLANG_MOE_CONFIG_DIR={folder}", ("sizes",))
