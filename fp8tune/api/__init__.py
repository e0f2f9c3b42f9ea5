"""The Python API: what the commands do, for programs and notebooks.

    import fp8tune

    results = fp8tune.open()                      # or a path, or postgresql://USER@HOST/NAME
    results.picks(kernel="colwise", arch="sm_90")  # a pandas DataFrame
    fp8tune.lookup("colwise", "M=16640 K=5120 G=16", arch="sm_90").config
    print(fp8tune.export(arch="sm_90", kernel="colwise"))
    fp8tune.sweep("colwise", "llama4", db="mine.db", callback=print)

What goes wrong raises :class:`fp8tune.errors.Fp8tuneError`: one line, what happened and what to do. What the commands
say on stderr goes to the logger ``fp8tune``, or is in a result's ``notices``.
"""

from fp8tune.api.exporting import Exported, export
from fp8tune.api.looking_up import Lookup, lookup
from fp8tune.api.results import Results, open
from fp8tune.api.sweeping import Swept, sweep

__all__ = ["Exported", "Lookup", "Results", "Swept", "export", "lookup", "open", "sweep"]
