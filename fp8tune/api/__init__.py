"""The Python API: what the commands do, for programs and notebooks.

    import fp8tune

    results = fp8tune.open()
    results.picks("colwise", "K=5120", device="H100")[["size", "speedup", "time_us", "config", "verdict"]]
    fp8tune.lookup("colwise", "M=16640 K=5120 G=16", arch="sm_90").config
    print(fp8tune.export("sm_90", "colwise"))
    fp8tune.sweep("colwise", "llama4", db="mine.db")

What goes wrong raises :class:`fp8tune.errors.Fp8tuneError` with the line that the command prints.
"""

from fp8tune.api.exporting import Export, Lookup, export, lookup
from fp8tune.api.results import Results, open
from fp8tune.api.running import Comparison, Recheck, SweepResult, compare, recheck, sweep
from fp8tune.errors import Fp8tuneError
from fp8tune.options import CompareOptions, SweepOptions
from fp8tune_kernels.pinning import PinError, pin, pin_report, unpin

__all__ = [
    "CompareOptions",
    "Comparison",
    "Export",
    "Fp8tuneError",
    "Lookup",
    "PinError",
    "Recheck",
    "Results",
    "SweepOptions",
    "SweepResult",
    "compare",
    "export",
    "lookup",
    "open",
    "pin",
    "pin_report",
    "recheck",
    "sweep",
    "unpin",
]
