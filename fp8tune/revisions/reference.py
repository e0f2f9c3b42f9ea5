"""The text that names a kernel everywhere, with its recording and its check.

``NAME``, ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``; then, where the kernel has no spec, ``@RECORDING.json``; then,
where something else than the kernel's own check is asked, ``?check=tolerance&relative=1e-3&reference=module:function``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from fp8tune.errors import UsageError, unknown
from fp8tune_kernels.spec import CHECKS, Tolerance

_TEXT = re.compile(
    r"(?P<kernel>[^?]*?:[^\W\d][\w.]*(?:\[[\w.'\-]+\])?|[^@?]*)(@(?P<recording>[^?]+))?(\?(?P<options>.*))?", re.DOTALL
)

_OPTIONS = ("check", "relative", "absolute", "reference", "inputs", "shared", "sizes")


@dataclass(frozen=True)
class KernelReference:
    """A kernel as the user names it. ``str()`` gives the text that :meth:`parse` takes."""

    kernel: str
    """A name, ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``."""
    recording: str = ""
    """The path of a recording; empty for a kernel with a spec."""
    check: str = ""
    """One of :data:`fp8tune_kernels.spec.CHECKS`; empty: the kernel's own."""
    relative: float | None = None
    absolute: float | None = None
    """The bound of ``check=tolerance``; None: what suits the dtypes of the outputs."""
    reference: str = ""
    """``module:function``, called with the kernel's arguments by name; empty: the kernel's own."""
    sizes: str = ""
    """``recorded``: nothing is checked on other sizes than were recorded."""
    inputs: str = ""
    """``module:function``, called with a config and the arguments by name: makes the inputs that depend on configs."""
    shared: str = ""
    """Names of arguments, with commas between them: launches in which they are equal share a config."""

    @classmethod
    def parse(cls, text: str) -> KernelReference:
        """Parse a text. Raises UsageError for an option that does not exist, or a value that it does not take."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return cls(text)
        options: dict[str, str] = {}
        for option in filter(None, (match["options"] or "").split("&")):
            name, _, value = option.partition("=")
            if name not in _OPTIONS:
                raise unknown(f"option in {text!r}", name, _OPTIONS)
            options[name] = value
        bounds = {name: _bound(name, options.pop(name)) for name in ("relative", "absolute") if name in options}
        return cls(match["kernel"], match["recording"] or "", **bounds, **options)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if self.check and self.check not in CHECKS:
            raise unknown("check", self.check, CHECKS)
        if self.sizes not in ("", "recorded"):
            raise UsageError(f"sizes={self.sizes} is unknown: write sizes=recorded, or leave it out")
        if (self.relative is not None or self.absolute is not None) and self.check != "tolerance":
            raise UsageError(f"{self.kernel}: relative and absolute are bounds of check=tolerance: ask for that too")
        for name in ("reference", "inputs"):
            if (function := getattr(self, name)) and not re.fullmatch(r".+:[^\W\d]\w*", function):
                raise UsageError(f"{name} {function!r} names no function: write module:function")

    def __str__(self) -> str:
        values = [(name, getattr(self, name)) for name in _OPTIONS]
        options = "&".join(f"{name}={value}" for name, value in values if value not in ("", None))
        return self.kernel + (f"@{self.recording}" if self.recording else "") + (f"?{options}" if options else "")

    @property
    def tolerance(self) -> Tolerance | None:
        """The bound of the text; None where it has none."""
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


def _bound(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"{name}={text} is no bound: give a number from 0, such as {name}=1e-3")
    return value
