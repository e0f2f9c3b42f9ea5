"""JSON files beside a kernel of the Hugging Face Hub: one file for each weight shape, and in it M -> config.

Specified in huggingface/kernels, docs/source/builder/triton-autotune.md ("Ship Triton autotune configurations"); the
reader is examples/kernels/gemm-triton-autotune/torch-ext/gemm_triton_autotune/tuning.py, both read at 2cd8593 and
18c4d68. It opens the file with exactly the name it makes, takes every key for an integer, and goes by the nearest M in
log space. Which sizes the name has is each kernel's own choice; the example's are N and K.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from fp8tune.errors import UsageError
from fp8tune.export.formats import PublishedPick, by_size
from fp8tune.export.formats.by_size import Sizes
from fp8tune.export.formats.documents import bare_name, device_file_name, file_name
from fp8tune.export.given import File, Given

_FIRST = ("E", "N", "K")
"""The order of sizes in a name, as the example and vLLM have it; other dims follow as the kernel has them."""


def write(given: Given, *, inside: str = "", sizes: Sizes | None = None) -> list[File]:
    """A folder named after the kernel, for its ``configs``, with a file for each combination of the sizes outside.

    ``inside``: the size that a file maps to configs; by default M, else the dim that varies most. ``sizes``: other
    names for dims, or a dim's value, such as ``{"N": "hidden_size"}``. Raises UsageError for a dim that is not there.
    """
    sizes = sizes or {}
    if not given.tuned:
        return []
    dims = _dims(given)
    renamed = {dim: name for name, dim in sizes.items() if isinstance(dim, str)}
    names = [renamed.get(dim, dim) for dim in dims]
    names += [name for name in sizes if name not in names]
    inside = inside or _inside(given, names, sizes)
    outside = [name for name in names if name != inside]
    outside.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    dtypes = len({one.problem.in_dtype for one in given.tuned}) > 1
    device = device_file_name(given.device.name)
    folder = PurePosixPath(file_name(bare_name(given.kernel)))
    files = []
    for table in by_size.tables(given.tuned, outside, inside, sizes, dtypes):
        parts = [*(f"{name}={size}" for name, size in table.sizes.items()), f"device_name={device}"]
        parts += [f"dtype={table.dtype}"] if dtypes else []
        files += by_size.files(given, folder / (file_name(",".join(parts)) + ".json"), table)
    return files


def read(path: Path, kernel: str = "") -> list[PublishedPick]:
    """The picks of one file. Raises UsageError for a damaged one."""
    return by_size.read(path, kernel)


def _dims(given: Given) -> list[str]:
    """The dims that all problems have and that a lookup goes by: those of the autotuner's key where it was recorded."""
    first, *others = (one.problem.shape for one in given.tuned)
    dims = [dim for dim in first if all(dim in shape for shape in others)]
    keyed = [dim for dim in dims if given.recorded and dim in given.recorded.key]
    if not dims:
        raise UsageError(f"the problems of {given.kernel} have no dim in common: export them one by one")
    return keyed or dims


def _inside(given: Given, names: list[str], sizes: Sizes) -> str:
    if "M" in names:
        return "M"

    def different(name: str) -> int:
        return len({by_size.size_of(one.problem, name, sizes) for one in given.tuned})

    return max(names, key=different)  # the first of equals
