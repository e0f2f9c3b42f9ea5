"""JSON files named by sizes and device, as Hugging Face kernels, vLLM and SGLang read them: one more size -> config.

Hugging Face: docs/source/builder/triton-autotune.md of huggingface/kernels, and its example gemm-triton-autotune. Each
kernel chooses the sizes in the name; the reader takes the nearest M.

vLLM: ``get_config_file_name`` and ``get_moe_configs`` of its fused MoE. All of the H200 family are ``NVIDIA_H200``.
SGLang: fused_moe_triton_config.py, with a blank in ``block_shape=[128, 128]``, and a folder for each version of Triton
instead of the entry ``triton_version``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from fp8tune.errors import UsageError
from fp8tune.records import NamedInts, Problem
from fp8tune.tables.files import File
from fp8tune.tables.formats import Format, Options
from fp8tune.tables.picks import KernelPicks, Pick, file_name, least_worst
from fp8tune.text import NAME, visible

DTYPES = {
    "bfloat16": "",
    "float16": "",
    "float32": "float32",
    "int8": "int8_w8a8",
    "float8_e4m3fn": "fp8_w8a8",
    "float8_e4m3fnuz": "fp8_w8a8",
}
"""Dtype of the activations -> its name in vLLM's and SGLang's file names."""

_ORDER = ("E", "N", "K")
"""Sizes that come first in Hugging Face's file names."""

_NEEDED = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")
"""Names that the code of vLLM and SGLang takes from a config."""

_BLOCK = ("block_n", "block_k")
"""Sizes of weights that are quantized by blocks, written as ``block_shape``."""

_DIM_OR_NUMBER = re.compile(rf"{NAME.pattern}|[0-9]{{1,18}}")


def parse_sizes(texts: Iterable[str]) -> dict[str, str | int]:
    """Parse ``M=num_tokens`` and ``E=8``.

    Raises:
        UsageError: A text is neither.
    """
    sizes: dict[str, str | int] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not NAME.fullmatch(name) or not _DIM_OR_NUMBER.fullmatch(value):
            raise UsageError(
                f"--size {visible(text)!r} is no size: give NAME=DIM or NAME=NUMBER, such as M=num_tokens or E=8"
            )
        sizes[name] = int(value) if value.isdigit() else value
    return sizes


@dataclass(frozen=True)
class _Group:
    """Picks of one file, by the size inside."""

    sizes: NamedInts
    dtype: str
    picks: Mapping[int, Sequence[Pick]]


def write_hugging_face(kernels: Sequence[KernelPicks], options: Options) -> list[File]:
    """Write a folder named after the kernel, with a file for each combination of the sizes outside."""
    (kernel,) = kernels
    dims = _lookup_dims(kernel)
    renamed = {dim: name for name, dim in options.sizes.items() if isinstance(dim, str)}
    names = list(dict.fromkeys([*(renamed.get(dim, dim) for dim in dims), *options.sizes]))

    def count(name: str) -> int:
        return len({_size(pick.problem, name, options) for pick in kernel.picks})

    inside = "M" if "M" in names else max(names, key=count)
    outside = sorted((name for name in names if name != inside), key=lambda name: [*_ORDER, name].index(name))
    has_dtypes = len({pick.problem.in_dtype for pick in kernel.picks}) > 1
    files = []
    for group in _groups(kernel, outside, inside, options, has_dtypes):
        parts = [*(f"{name}={size}" for name, size in group.sizes.items()), f"device_name={_device(kernel)}"]
        parts += [f"dtype={group.dtype}"] if has_dtypes else []
        files.append(_file(kernel, PurePosixPath(file_name(kernel.bare_name), _json_name(parts)), group))
    return files


def write_vllm(kernels: Sequence[KernelPicks], options: Options) -> list[File]:
    """Write a file for each E, N and dtype."""
    (kernel,) = kernels
    device = _device(kernel)
    family = "NVIDIA_H200" if "H200" in device.split("_") else device
    head = {"triton_version": kernel.device.triton}
    return _write_fused_moe(kernel, options, PurePosixPath(), family, ",", head)


def write_sglang(kernels: Sequence[KernelPicks], options: Options) -> list[File]:
    """Write a file for each E, N and dtype, in a folder of the Triton version."""
    (kernel,) = kernels
    version = file_name(kernel.device.triton).replace(".", "_")
    return _write_fused_moe(kernel, options, PurePosixPath("configs", f"triton_{version}"), _device(kernel), ", ", {})


def _write_fused_moe(
    kernel: KernelPicks, options: Options, folder: PurePosixPath, device: str, comma: str, head: Mapping[str, str]
) -> list[File]:
    if options.dtype and not NAME.fullmatch(options.dtype):
        raise UsageError(f"--dtype {visible(options.dtype)!r} is no name: give one as vLLM does, such as fp8_w8a8")
    for pick in kernel.picks:
        kwargs = kernel.triton_config(pick.config).kwargs
        if missing := [name for name in _NEEDED if name not in kwargs]:
            raise UsageError(
                f"{kernel.kernel} has no {missing[0]}: vLLM and SGLang read configs of a fused MoE; use --for python"
            )
    dims = {*options.sizes, *(dim for pick in kernel.picks for dim in pick.problem.shape)}
    outside = ("E", "N", *(_BLOCK if dims.issuperset(_BLOCK) else ()))
    files: list[File] = []
    for group in _groups(kernel, outside, "M", options, has_dtypes=True):
        dtype = _fused_moe_dtype(group.dtype) if options.dtype is None else options.dtype
        parts = [f"E={group.sizes['E']}", f"N={group.sizes['N']}", f"device_name={device}"]
        parts += [f"dtype={dtype}"] if dtype else []
        block = [str(group.sizes[name]) for name in _BLOCK if name in group.sizes]
        parts += [f"block_shape=[{comma.join(block)}]"] if block else []
        files.append(_file(kernel, folder / _json_name(parts), group, head))
    if len({file.path for file in files}) < len(files):  # bfloat16 and float16 have one name
        raise UsageError(f"{kernel.kernel} was tuned with several dtypes of one name in vLLM: export one at a time")
    return files


def _fused_moe_dtype(in_dtype: str) -> str:
    if in_dtype not in DTYPES:
        raise UsageError(f"vLLM has no name for the dtype {in_dtype or 'unknown'}: give --dtype, such as fp8_w8a8")
    return DTYPES[in_dtype]


def _lookup_dims(kernel: KernelPicks) -> list[str]:
    """Return the dims that all problems have: those of the autotuner's key where the kernel was recorded."""
    first, *others = (pick.problem.shape for pick in kernel.picks)
    dims = [dim for dim in first if all(dim in shape for shape in others)]
    if not dims:
        raise UsageError(f"the problems of {kernel.kernel} have no dim in common: use --for python")
    return [dim for dim in dims if kernel.recorded and dim in kernel.recorded.key] or dims


def _size(problem: Problem, name: str, options: Options) -> int:
    dim = options.sizes.get(name, name)
    if isinstance(dim, int):
        return dim
    if dim in problem.shape:
        return problem.shape[dim]
    dims = ", ".join(problem.shape)
    raise UsageError(f"{problem.kernel} has no dim {dim}, only {dims}: give --size {name}=DIM or --size {name}=NUMBER")


def _groups(
    kernel: KernelPicks, outside: Sequence[str], inside: str, options: Options, has_dtypes: bool
) -> list[_Group]:
    files: dict[tuple[tuple[int, ...], str], dict[int, list[Pick]]] = {}
    for pick in kernel.picks:
        values = tuple(_size(pick.problem, name, options) for name in outside)
        by_size = files.setdefault((values, pick.problem.in_dtype if has_dtypes else ""), {})
        by_size.setdefault(_size(pick.problem, inside, options), []).append(pick)
    return [
        _Group(NamedInts(list(zip(outside, values, strict=True))), dtype, dict(sorted(by_size.items())))
        for (values, dtype), by_size in sorted(files.items(), key=lambda item: item[0])
    ]


def _file(kernel: KernelPicks, path: PurePosixPath, group: _Group, head: Mapping[str, str] | None = None) -> File:
    """Return the file of one group."""
    entries: dict[str, object] = dict(head or {})
    for size, picks in group.picks.items():
        config = kernel.triton_config(least_worst(picks)[0])
        if config.has_pre_hook or any(isinstance(value, Mapping) for value in config.kwargs.values()):
            what = "a pre_hook" if config.has_pre_hook else "values that JSON does not have"
            raise UsageError(f"configs of {kernel.kernel} have {what}: export --for python, and use fp8tune.pin")
        entries[str(size)] = {**config.kwargs, **config.options}
    return File(path, json.dumps(entries, indent=4, allow_nan=False) + "\n")


def _device(kernel: KernelPicks) -> str:
    if not kernel.device.name:
        raise UsageError("the database does not name the device, as the format's file names do: sweep on the GPU")
    return file_name(kernel.device.name.replace(" ", "_"))


def _json_name(parts: Iterable[str]) -> str:
    return f"{file_name(','.join(parts))}.json"


HUGGING_FACE = Format(
    write_hugging_face, "put the folder's files into the kernel's configs, as the Hub's kernels load them", ("sizes",)
)
VLLM = Format(write_vllm, "set VLLM_TUNED_CONFIG_FOLDER={folder}", ("sizes", "dtype"))
SGLANG = Format(write_sglang, "set SGLANG_MOE_CONFIG_DIR={folder}", ("sizes", "dtype"))
