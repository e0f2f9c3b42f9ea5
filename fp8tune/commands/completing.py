"""The names that a shell completes. Loads no torch, and gives nothing where it cannot look."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fp8tune.options import Names
from fp8tune.plan.shapes import list_sets
from fp8tune.stats.study import Verdict
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.catalog import KERNELS

VARIABLE = "_FP8TUNE_COMPLETE"
"""Set by a shell that asks for names: ``complete_bash``, ``complete_zsh`` or ``complete_fish``."""


def names(kind: Names) -> Sequence[str]:
    """All names of a kind, empty where they cannot be read."""
    try:
        found: dict[Names, Callable[[], Sequence[str]]] = {
            Names.KERNEL: lambda: KERNELS,
            Names.ARCH: lambda: tuple(ARCHES),
            Names.SHAPES: list_sets,
            Names.VERDICT: lambda: list(Verdict),
        }
        return found[kind]()
    except OSError:
        return ()


def completer(kind: Names) -> Callable[..., list[str]]:
    """What typer calls for the names that begin as what is typed."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names(kind) if name.startswith(incomplete)]

    return complete


def answer_shell(program: Any) -> None:
    """Print the names that a shell asks for, and end. Whatever goes wrong prints nothing: it would be in the prompt."""
    from typer import _completion_classes
    from typer._completion_classes import completion_init
    from typer.completion import shell_complete

    vars(_completion_classes)["_sanitize_help_text"] = str  # ours has no markup, and rich takes as long as all the rest
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            completion_init()
            code = shell_complete(program, {}, "fp8tune", VARIABLE, os.environ[VARIABLE])
    except SystemExit as ended:  # fish asks whether there are names
        code = int(ended.code or 0)
    except Exception:
        code = 1
    sys.exit(code)
