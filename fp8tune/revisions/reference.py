"""Texts that name a kernel, with its recording and its check.

``NAME``, ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``; then ``@RECORDING.json`` for a kernel without a spec; then
options that replace the kernel's own check: ``?check=tolerance&relative=1e-3&reference=module:function``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8tune import registry
from fp8tune.errors import UsageError, unknown
from fp8tune_kernels import identity
from fp8tune_kernels.identity import Location
from fp8tune_kernels.spec import CHECKS, Tolerance

_TEXT = re.compile(
    r"(?P<kernel>[^?]*?:[^\W\d][\w.]*(?:\[[\w.'\-]+\])?|[^@?]*)(@(?P<recording>[^?]+))?(\?(?P<options>.*))?", re.DOTALL
)
_OPTIONS = ("check", "relative", "absolute", "reference", "inputs", "shared", "sizes")


@dataclass(frozen=True)
class KernelReference:
    """Kernel as the user names it. ``str()`` gives the text that :meth:`parse` takes."""

    kernel: str  # a name, ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``
    recording: str = ""  # path; empty for a kernel with a spec
    check: str = ""  # one of :data:`fp8tune_kernels.spec.CHECKS`; empty for the kernel's own
    relative: float | None = None  # bound of ``check=tolerance``; None for one that suits the dtypes of the outputs
    absolute: float | None = None
    reference: str = ""  # ``module:function``, called with the arguments by name; empty for the kernel's own
    sizes: str = ""  # ``recorded`` to check recorded sizes only
    inputs: str = ""  # ``module:function`` that makes inputs that depend on configs, from a config and the arguments
    shared: str = ""  # names of arguments, by commas: launches in which they are equal share a config

    @classmethod
    def parse(cls, text: str) -> KernelReference:
        """Parse a text. Raises UsageError for an unknown option or a value that it does not take."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return cls(text)
        options: dict[str, Any] = {}
        for option in filter(None, (match["options"] or "").split("&")):
            name, _, value = option.partition("=")
            if name not in _OPTIONS:
                raise unknown(f"option in {text!r}", name, _OPTIONS)
            options[name] = _bound(name, value) if name in ("relative", "absolute") else value
        return cls(match["kernel"], match["recording"] or "", **options)

    def __post_init__(self) -> None:
        if self.check and self.check not in CHECKS:
            raise unknown("check", self.check, CHECKS)
        if self.sizes not in ("", "recorded"):
            raise UsageError(f"sizes={self.sizes} is unknown: write sizes=recorded, or leave it out")
        if self.tolerance and self.check != "tolerance":
            raise UsageError(f"{self.kernel}: relative and absolute need check=tolerance: add it")
        for name in ("reference", "inputs"):
            if (function := getattr(self, name)) and not re.fullmatch(r".+:[^\W\d]\w*", function):
                raise UsageError(f"{name} {function!r} is not a function: write module:function")

    def __str__(self) -> str:
        values = [(name, getattr(self, name)) for name in _OPTIONS]
        options = "&".join(f"{name}={value}" for name, value in values if value not in ("", None))
        return self.kernel + (f"@{self.recording}" if self.recording else "") + (f"?{options}" if options else "")

    @property
    def tolerance(self) -> Tolerance | None:
        """Bound of the text, if it has one."""
        if self.relative is None and self.absolute is None:
            return None
        return Tolerance(self.relative or 0.0, self.absolute or 0.0)

    @property
    def overrides(self) -> bool:
        """True if the text replaces the kernel's own check."""
        return bool(self.check or self.reference)

    def absolute_paths(self) -> KernelReference:
        """Return the reference for a process in any folder."""
        return replace(self, recording=str(Path(self.recording).absolute())) if self.recording else self


def place(text: str) -> str:
    """Return the ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE`` of a text. Raises UsageError if it names no kernel."""
    kernel = KernelReference.parse(text).kernel
    named = registry.kernels().get(kernel, kernel)
    if ":" not in named:
        raise unknown("kernel", kernel, registry.kernels())
    return named


def locate(text: str) -> Location:
    """Return the location of a kernel from its text. Raises UsageError if the text names none."""
    try:
        return identity.locate(place(text))
    except identity.InvalidCodeError as error:
        raise UsageError(str(error)) from None


def _bound(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"{name}={text} is not a bound: give a number from 0, such as {name}=1e-3")
    return value
