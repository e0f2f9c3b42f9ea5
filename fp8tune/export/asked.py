"""What a user asks to export, from rows to texts: for the command and for the Python API."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fp8tune.errors import UsageError
from fp8tune.export import given
from fp8tune.export.formats import by_size
from fp8tune.export.formats.known import DIFF, known
from fp8tune.export.given import File, Given
from fp8tune.store import names
from fp8tune.store.layers import Reader

DEFAULT_WITHIN = 0.02
"""What a problem may lose by having fewer configs: less than kernels differ between two machines."""


def check_options(
    name: str, kernels: Sequence[str], *, sizes: bool = False, dtype: bool = False, within: bool = False
) -> None:
    """Raise UsageError for an option that does not go with a format, an unknown one, and but for one kernel."""
    wanted = known(name)
    if sizes and "sizes" not in wanted.options:
        raise UsageError(f"--size is for --for json and vllm: the files of --for {name} are not named by sizes")
    if dtype and "dtype" not in wanted.options:
        raise UsageError(f"--dtype is for --for vllm: the files of --for {name} name no such dtype")
    if within and name != DIFF:
        raise UsageError(f"--within is for --for diff: --for {name} has a config for each key")
    if len(kernels) != 1:
        raise UsageError("--for writes the picks of one kernel: name it with --kernel")


def givens(store: Reader, arch: str, kernels: Sequence[str], device: str | None, name: str) -> list[Given]:
    """The picks of one kernel, for each device that the format ``name`` holds.

    Raises UsageError for an unknown name, and where nothing was swept to its end.
    """
    names.check_arch(arch, store)
    (kernel,) = names.stored_kernels(kernels, store)
    if known(name).has_all_devices and device is None:
        return given.given_for_each_device(store, arch, kernel)
    return [given.given_for(store, arch, kernel, device)]


def files(
    found: Sequence[Given], name: str, sizes: Sequence[str], dtype: str | None, notice: Callable[[str], None]
) -> list[File]:
    """The files of a format that is no diff. Raises UsageError where it holds no pick."""
    made = known(name).write(found, notice=notice, sizes=by_size.sizes(sizes), dtype=dtype)
    if not made:
        raise UsageError(f"{found[0].kernel} has no pick that --for {name} could hold")
    return made
