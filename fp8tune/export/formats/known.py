"""The formats by name. A format's module is imported when it is asked for: one of them needs Triton."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from fp8tune.errors import unknown
from fp8tune.export.given import File, Given


@dataclass(frozen=True)
class Format:
    """One format."""

    module: str
    next: str
    """How the consumer reads the files, one line. ``{folder}`` is where they were written, ``{device}`` the first
    folder below it."""

    options: tuple[str, ...] = ()
    """What it takes beside the picks: ``notice``, ``sizes``, ``dtype``."""
    has_all_devices: bool = False
    """Whether its files hold every device of an arch."""

    def write(self, givens: Sequence[Given], **options: Any) -> list[File]:
        """The files. ``options``: all that any format takes, see :attr:`options`."""
        module = importlib.import_module(f"fp8tune.export.formats.{self.module}")
        return cast(list[File], module.write(*givens, **{name: options[name] for name in self.options}))


DIFF = "diff"
"""The format that is no set of files: see :mod:`fp8tune.export.formats.diff`."""

FORMATS = {
    "triton-cache": Format(
        "triton_cache", "run the program with TRITON_CACHE_AUTOTUNING=1 TRITON_CACHE_DIR={folder}/{device}", ("notice",)
    ),
    "python": Format(
        "python_file", "put the file beside the kernel; its docstring has the lines that use it", has_all_devices=True
    ),
    "json": Format(
        "huggingface", "put the folder's files into the kernel's configs, as the Hub's kernels load them", ("sizes",)
    ),
    "vllm": Format(
        "vllm",
        "set VLLM_TUNED_CONFIG_FOLDER={folder}/vllm, or SGLANG_MOE_CONFIG_DIR={folder}/sglang",
        ("sizes", "dtype"),
    ),
    "fla": Format("fla", "set FLA_CONFIG_DIR={folder}/{device} and FLA_CACHE_MODE=strict"),
    DIFF: Format("diff", "in the folder above the package: git apply FILE, or patch -p1 < FILE"),
    "t4": Format("t4", "any reader of T4 results and metadata takes the folder"),
}


def known(name: str) -> Format:
    """The format of a name. Raises UsageError, which names the others."""
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    return FORMATS[name]
