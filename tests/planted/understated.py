"""Specs for the simulated clock: one with an honest key, one whose winner also depends on G, which its key leaves out.

The clock draws a landscape for each lookup key: what ``lookup_key`` says beyond ``key`` is the planted dependence.
"""

from __future__ import annotations

from dataclasses import replace

from faults import SPEC as FAULTS

from fp8tune_kernels.spec import KernelSpec, NamedInts, Problem


class Understated(KernelSpec):
    """Depends on the number of groups as well."""

    def lookup_key(self, problem: Problem) -> NamedInts:
        return NamedInts({**super().lookup_key(problem), "G": problem.shape["G"]})


HONEST = replace(
    FAULTS,
    name="planted-honest",
    axes={"BLOCK_SIZE": (16, 32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (1, 2)},
    default=NamedInts(BLOCK_SIZE=32, num_warps=4, num_stages=1),
    key=("M_bucket", "K", "G"),
    problems=lambda row: iter([NamedInts(M=row["M"], K=row["K"], G=row["E"])]),
)
UNDERSTATED = Understated(**{**vars(HONEST), "name": "planted-understated", "key": ("M_bucket", "K")})
