"""JSON files that map one size to configs, for Hugging Face kernels, vLLM and SGLang.

The file name has the other sizes and the device. Hugging Face kernels choose these sizes (see triton-autotune.md of
huggingface/kernels). vLLM calls every H200 ``NVIDIA_H200`` (see ``get_config_file_name``). SGLang puts a space into
``block_shape=[128, 128]`` (see fused_moe_triton_config.py), and has a folder for each Triton version where vLLM has an
entry ``triton_version``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from fp8tune.errors import UsageError
from fp8tune.tables.files import File
from fp8tune.tables.formats import Format, Options
from fp8tune.tables.picks import KernelPicks, Pick, shared_config
from fp8tune.text import NAME, visible

DTYPES = {"bfloat16": "", "float16": "", "float32": "float32", "int8": "int8_w8a8"}
DTYPES |= dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz"), "fp8_w8a8")
"""Mapping from the dtype of the activations to its name in the file names of vLLM and SGLang."""

_LEADING_SIZES = ("E", "N", "K")  # sizes that come first in Hugging Face's file names
_REQUIRED_NAMES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")  # names that vLLM and SGLang require in a config
_BLOCK_SIZES = ("block_n", "block_k")  # sizes of the blocks of quantized weights, written as block_shape


def parse_sizes(texts: Iterable[str]) -> dict[str, str | int]:
    """Parse sizes such as ``M=num_tokens``, ``M=num_rows/8`` and ``E=8``. Raises UsageError for any other text."""
    sizes: dict[str, str | int] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not NAME.fullmatch(name) or not re.fullmatch(rf"{NAME.pattern}(/[1-9][0-9]{{0,8}})?|[0-9]{{1,18}}", value):
            raise UsageError(f"--size {visible(text)!r} is no size: give NAME=DIM or NAME=NUMBER, such as M=tokens")
        sizes[name] = int(value) if value.isdigit() else value
    return sizes


def write_hugging_face(kernels: Sequence[KernelPicks], options: Options) -> list[File]:
    """Return a file for each combination of the sizes in the file name, in a folder named after the kernel."""
    (kernel,) = kernels
    first, *others = (pick.problem.shape for pick in kernel.picks)
    dims = [dim for dim in first if all(dim in shape for shape in others)]
    dims = [dim for dim in dims if kernel.recorded and dim in kernel.recorded.key] or dims
    renamed = {dim: name for name, dim in options.sizes.items() if isinstance(dim, str)}
    names = list(dict.fromkeys([*(renamed.get(dim, dim) for dim in dims), *options.sizes]))
    if not names:
        raise UsageError(f"the problems of {kernel.kernel} have no dim in common: use --for python")
    inside = "M" if "M" in names else max(names, key=lambda name: len({_size(p, name, options) for p in kernel.picks}))
    outside = sorted((name for name in names if name != inside), key=lambda name: [*_LEADING_SIZES, name].index(name))
    has_dtypes = len({pick.problem.in_dtype for pick in kernel.picks}) > 1

    def path(pick: Pick) -> PurePosixPath:
        parts = [*(f"{name}={_size(pick, name, options)}" for name in outside), f"device_name={_device_name(kernel)}"]
        parts += [f"dtype={pick.problem.in_dtype}"] if has_dtypes else []
        return PurePosixPath(_safe_file_name(kernel.bare_name), _safe_file_name(",".join(parts)) + ".json")

    return _build_files(kernel, options, inside, path, {})


def write_vllm(kernels: Sequence[KernelPicks], options: Options) -> list[File]:
    """Return vLLM's fused-MoE files, one for each combination of E, N and dtype."""
    device = _device_name(kernels[0])
    family = "NVIDIA_H200" if "H200" in device.split("_") else device
    head = {"triton_version": kernels[0].device.triton}
    return _write_fused_moe(kernels[0], options, PurePosixPath(), family, ",", head)


def write_sglang(kernels: Sequence[KernelPicks], options: Options) -> list[File]:
    """Return SGLang's fused-MoE files, one for each combination of E, N and dtype, in the Triton version's folder."""
    version = _safe_file_name(kernels[0].device.triton).replace(".", "_")
    folder = PurePosixPath("configs", f"triton_{version}")
    return _write_fused_moe(kernels[0], options, folder, _device_name(kernels[0]), ", ", {})


def _write_fused_moe(
    kernel: KernelPicks, options: Options, folder: PurePosixPath, device: str, comma: str, head: Mapping[str, str]
) -> list[File]:
    if options.dtype and not NAME.fullmatch(options.dtype):
        raise UsageError(f"--dtype {visible(options.dtype)!r} is no name: give one as vLLM does, such as fp8_w8a8")
    missing = [name for name in _REQUIRED_NAMES for pick in kernel.picks if name not in pick.config]
    if missing:
        raise UsageError(f"{kernel.kernel} has no {missing[0]}, which fused-MoE kernels have: use --for python")
    dims = {*options.sizes, *(dim for pick in kernel.picks for dim in pick.problem.shape)}
    blocks = _BLOCK_SIZES if dims.issuperset(_BLOCK_SIZES) else ()

    def path(pick: Pick) -> PurePosixPath:
        dtype = DTYPES.get(pick.problem.in_dtype) if options.dtype is None else options.dtype
        if dtype is None:
            raise UsageError(f"vLLM has no name for the dtype {pick.problem.in_dtype}: give --dtype, such as fp8_w8a8")
        parts = [*(f"{name}={_size(pick, name, options)}" for name in ("E", "N")), f"device_name={device}"]
        parts += [f"dtype={dtype}"] if dtype else []
        parts += [f"block_shape=[{comma.join(str(_size(pick, name, options)) for name in blocks)}]"] if blocks else []
        return folder / f"{_safe_file_name(','.join(parts))}.json"

    return _build_files(kernel, options, "M", path, head)


def _build_files(
    kernel: KernelPicks, options: Options, inside: str, path: Callable[[Pick], PurePosixPath], head: Mapping[str, str]
) -> list[File]:
    """Return the files. Picks with the same file and size get the config whose worst slowdown is smallest."""
    groups: dict[PurePosixPath, dict[int, list[Pick]]] = {}
    for pick in kernel.picks:
        groups.setdefault(path(pick), {}).setdefault(_size(pick, inside, options), []).append(pick)
    files = []
    for name, by_size in sorted(groups.items()):
        entries: dict[str, object] = dict(head)
        for size, picks in sorted(by_size.items()):
            config = kernel.triton_config(shared_config(picks))
            if config.has_pre_hook or any(isinstance(value, Mapping) for value in config.kwargs.values()):
                what = "a pre_hook" if config.has_pre_hook else "values that JSON does not have"
                raise UsageError(f"configs of {kernel.kernel} have {what}: export --for python, and use fp8tune.pin")
            entries[str(size)] = {**config.kwargs, **config.options}
        files.append(File(name, json.dumps(entries, indent=4, allow_nan=False) + "\n"))
    return files


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
    return _safe_file_name(kernel.device.name.replace(" ", "_"))


def _safe_file_name(text: str) -> str:
    """Return the text with unusual characters replaced by ``_``. The file stays in its folder and is not hidden."""
    return re.sub(r"[^A-Za-z0-9_.,=()\[\] +-]+", "_", text).lstrip(".")[:200] or "_"


HUGGING_FACE = Format(
    write_hugging_face, "put the folder's files into the kernel's configs, as the Hub's kernels load them", ("sizes",)
)
VLLM = Format(write_vllm, "set VLLM_TUNED_CONFIG_FOLDER={folder}", ("sizes", "dtype"))
SGLANG = Format(write_sglang, "set SGLANG_MOE_CONFIG_DIR={folder}", ("sizes", "dtype"))
