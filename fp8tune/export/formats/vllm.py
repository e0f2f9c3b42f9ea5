"""Configs of a fused MoE kernel as vLLM and SGLang read them: one file for E, N, device and dtype, in it M -> config.

vLLM: ``get_config_file_name`` and ``get_moe_configs`` in vllm/model_executor/layers/fused_moe (fused_moe.py, later a
module of its own) and ``save_configs`` of benchmarks/kernels/benchmark_moe.py; configs/README says what E, N and M
are. Its reader drops ``triton_version``, takes every other key for an integer and goes by the nearest M. All of the
H200 family are ``NVIDIA_H200``. ``VLLM_TUNED_CONFIG_FOLDER`` names a folder that it reads first.

SGLang: fused_moe_triton_config.py. The same names, but a blank in ``block_shape=[128, 128]``; a folder for each
version of Triton instead of ``triton_version``, which its reader would take for a size; ``_down`` for the second
GEMM, without which it goes by the first's. ``SGLANG_MOE_CONFIG_DIR`` names the folder above ``configs``.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from fp8tune.errors import UsageError
from fp8tune.export.formats import PublishedPick, by_size
from fp8tune.export.formats.by_size import Sizes, Table
from fp8tune.export.formats.documents import device_file_name, file_name
from fp8tune.export.given import File, Given
from fp8tune.text import NAME, visible

KERNEL = "fused_moe_kernel"
"""What both call the kernel: their files do not say it."""

_NEEDED = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")
"""What their code takes from a config besides passing it on."""

_BLOCK = ("block_n", "block_k")
"""Of quantized weights: what is read as these sizes is written as ``block_shape``."""

DTYPES = {
    "bfloat16": "",
    "float16": "",
    "float32": "float32",
    "int8": "int8_w8a8",
    "float8_e4m3fn": "fp8_w8a8",
    "float8_e4m3fnuz": "fp8_w8a8",
}
"""Dtype of the activations -> what both put into the name."""


def write(given: Given, *, sizes: Sizes | None = None, dtype: str | None = None) -> list[File]:
    """Folder ``vllm``, and ``sglang/configs/triton_X_Y_Z`` with the same picks.

    ``sizes``: what E, N and M are, such as ``{"E": 8, "M": "num_tokens"}``; of weights that are quantized by blocks
    also ``block_n`` and ``block_k``. ``dtype``: as they call it, such as ``int4_w4a16``; by default from the input's.
    Raises UsageError for a kernel without these sizes, and for configs that their code cannot launch.
    """
    if dtype and not NAME.fullmatch(dtype):
        raise UsageError(f"--dtype {visible(dtype)!r} is no dtype: give one as vLLM calls it, such as fp8_w8a8")
    for config in (given.configs[one.config] for one in given.tuned):
        if missing := [name for name in _NEEDED if name not in config.kwargs]:
            raise UsageError(f"configs of {given.kernel} have no {missing[0]}: vLLM reads configs of a fused MoE alone")
    sizes = sizes or {}
    known = {*sizes, *(dim for one in given.tuned for dim in one.problem.shape)}
    outside = ("E", "N", *(_BLOCK if known.issuperset(_BLOCK) else ()))
    device, version = device_file_name(given.device.name), file_name(given.device.triton).replace(".", "_")
    family = "NVIDIA_H200" if "H200" in device.split("_") else device
    files = []
    for table in by_size.tables(given.tuned, outside, "M", sizes, dtypes=True):
        named = _dtype(table.dtype) if dtype is None else dtype
        vllm = PurePosixPath("vllm", _name(table, family, named, ","))
        files += by_size.files(given, vllm, table, {"triton_version": given.device.triton})
        sglang = PurePosixPath("sglang", "configs", f"triton_{version}", _name(table, device, named, ", "))
        files += by_size.files(given, sglang, table)
    _check_distinct(files, given.kernel)
    return files


def read(path: Path, kernel: str = "") -> list[PublishedPick]:
    """The picks of one file of either. Raises UsageError for a damaged one."""
    return by_size.read(path, kernel or KERNEL)


def is_named(path: Path) -> bool:
    """Whether a file is named as those of a fused MoE are: by E and N."""
    return by_size.is_named(path) and path.name.startswith("E=") and ",N=" in path.name


def _name(table: Table, device: str, dtype: str, comma: str) -> str:
    parts = [f"E={table.sizes['E']}", f"N={table.sizes['N']}", f"device_name={device}"]
    parts += [f"dtype={dtype}"] if dtype else []
    block_shape = [str(table.sizes[name]) for name in _BLOCK if name in table.sizes]
    parts += [f"block_shape=[{comma.join(block_shape)}]"] if block_shape else []
    return file_name(",".join(parts)) + ".json"


def _dtype(in_dtype: str) -> str:
    if in_dtype not in DTYPES:
        raise UsageError(
            f"vLLM has no name for the dtype {in_dtype or 'unknown'}: give it with --dtype, such as fp8_w8a8"
        )
    return DTYPES[in_dtype]


def _check_distinct(files: list[File], kernel: str) -> None:
    """bfloat16 and float16 have one name: their picks cannot both be written."""
    paths = [file.path for file in files]
    if len(set(paths)) < len(paths):
        raise UsageError(f"{kernel} was tuned with several dtypes that vLLM has one name for: export one at a time")
