"""Options of a sweep as planning takes them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fp8tune import registry
from fp8tune.errors import UsageError
from fp8tune.options import SweepOptions
from fp8tune.plan import selection


@dataclass(frozen=True)
class Options:
    """Options of a sweep, parsed."""

    kernels: tuple[str, ...] = field(default_factory=lambda: tuple(registry.kernels()))
    shapes: tuple[str, ...] = ("llama4",)
    routing: str = "jagged"
    recording: str | None = None
    check: str | None = None
    """``exact``, ``exact-inputs``, ``tolerance`` or ``tolerance=RELATIVE,ABSOLUTE``; None for the kernel's own rule."""
    reference: str | None = None
    grid: tuple[str, ...] = ()
    arch: str | None = None
    static: bool = False
    """Compile only, even if ``arch`` is this machine's."""
    scale_mode: str | None = None
    in_dtype: str | None = None
    layout: str | None = None
    seed: int = 0
    timer: str | None = None
    again: bool = False
    retry_failed: bool = False
    quick: bool = False
    time_budget_s: float | None = None
    db: str | None = None
    command: str = ""
    """Command line that is stored with the results."""

    @classmethod
    def of(cls, options: SweepOptions, command: str) -> Options:
        """Parse the options of the command. Raises UsageError."""
        settings = selection.common_settings(map(selection.parse, options.shapes))
        if settings.groups:
            raise UsageError("--shapes SET,groups=FILE goes with fp8tune bench --op: leave it out")
        return cls(
            kernels=options.kernel or tuple(registry.kernels()),
            shapes=options.shapes,
            routing=settings.routing or cls.routing,
            scale_mode=settings.scale or None,
            in_dtype=settings.dtype or None,
            layout=settings.layout or None,
            seed=settings.seed,
            recording=options.recording,
            check=check_of(options.tolerance),
            reference=options.reference,
            grid=options.grid,
            arch=options.arch,
            static=options.arch is not None,
            timer=options.timer,
            again=options.again,
            retry_failed=options.again,
            quick=options.quick,
            time_budget_s=options.budget_s,
            db=options.db,
            command=command,
        )


def check_of(tolerance: str) -> str | None:
    """Return the rule that a ``--tolerance`` names; None for the kernel's own. Raises UsageError."""
    rules = {"auto": None, "exact": "exact", "exact-sums": "exact-inputs"}
    if tolerance in rules:
        return rules[tolerance]
    if re.fullmatch(r"[0-9.eE+-]{1,30},[0-9.eE+-]{1,30}", tolerance):
        return f"tolerance={tolerance}"
    raise UsageError(f"--tolerance {tolerance!r:.80} is unknown: use exact, exact-sums, auto or RTOL,ATOL")
