"""The kernels in one table: what each writes, what torchao has for it, and how near the ceiling its picks are.

python -m benchmarks.kernel_table            # in markdown, from results.db beside it
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.readme_table import ROOT, complete_studies
from fp8tune.bench.counterparts import COUNTERPARTS, GEMMS, TWO_KERNELS
from fp8tune.ceiling import ceiling_of
from fp8tune.render.terminal import share
from fp8tune.stats.study import Study
from fp8tune_kernels.catalog import KERNELS

WRITES = {
    "colwise": ("`(M, K)`, one scale a group of rows and column", "row-major → column-major"),
    "rowwise-2d": ("`(M, K)`, one scale a row", "row-major → row-major"),
    "rowwise": ("`(N, M)`, one scale a row and group of columns", "row-major or `.t()` → row-major"),
    "colwise-dual": ("two matrices as `colwise`, one launch", "row-major → column-major"),
    "rowwise-colwise": ("`rowwise-2d` and `colwise` in one read", "row-major → both"),
    "colwise-3d": ("weights, one scale a column of an expert", "column-major → column-major"),
    "transpose-3d-atomic": ("weights, one scale a row of an expert; atomics", "transposed in memory"),
    "transpose-3d-reduction": ("the same, without atomics", "transposed in memory"),
    "colwise-transpose-3d": ("`colwise-3d` and `transpose-3d` in one read", "column-major → both"),
    "rowwise-factored": ("`rowwise-2d`, over scales of columns", "row-major → row-major"),
    "mxfp8-dim0": ("MXFP8, blocks of 32 along K", "row-major → row-major"),
    "mxfp8-dim1": ("MXFP8, blocks of 32 along M", "row-major → column-major"),
    "mxfp8-dim1-3d": ("MXFP8 of weights, blocks of 32 along N", "row-major → column-major"),
    "mxfp8-dim1-3d-via-2d": ("the same, as one matrix and a copy", "row-major → column-major"),
    "transposed-codes": ("nothing: codes of rows for the other GEMM", "row-major → column-major"),
    "transposed-codes-3d": ("nothing: codes of weights for the other GEMM", "transposed in memory"),
    "swiglu-rowwise": ("SwiGLU of gate and up, one scale a row", "row-major → row-major"),
    "swiglu-gradient": ("the gradients of gate and up, one scale a row", "row-major → row-major"),
    "grouped-rows": ("GEMM of each group's rows and its expert", "row-major → row-major"),
    "grouped-contraction": ("GEMM over each group's rows", "column-major → row-major"),
    "expert-sort": ("nothing: rows in the order of experts", "pairs of token and expert"),
    "gathered-rows": ("`grouped-rows` on rows of tokens", "row-major → row-major"),
    "gathered-transpose": ("`transposed-codes` on rows of tokens", "row-major → column-major"),
    "gather-sum": ("nothing: rows, added up per token", "row-major → row-major"),
    "shifted-transpose-3d": ("weights, from a scale a row to one an expert", "transposed in memory"),
    "cast-transpose-3d": ("`colwise-3d` and a transpose of its codes in one read", "row-major → both"),
}
"""Kernel -> what it quantizes or multiplies, and how operands and results lie."""

GPUS = {"H100": "NVIDIA H100 80GB HBM3", "H200": "NVIDIA H200"}


PREFIX = "triton_fp8_"
"""Of many names of torchao: three dots stand for it, or the table is too wide."""


def counterpart(kernel: str) -> str:
    """The function of torchao, or of torch, that ``bench`` times beside a kernel."""
    if kernel in TWO_KERNELS:
        return " + ".join(f"of `{each}`" for each in TWO_KERNELS[kernel])
    if kernel not in (*GEMMS, *COUNTERPARTS):
        return "none"
    theirs = GEMMS[kernel][0] if kernel in GEMMS else COUNTERPARTS[kernel]
    if theirs.module == "torch":
        return f"`torch.{theirs.name}`"
    return f"`...{theirs.name.removeprefix(PREFIX)}`" if theirs.name.startswith(PREFIX) else f"`{theirs.name}`"


def markdown(studies: Iterable[Study]) -> str:
    """A line a kernel, in the family's order; the shares are medians over its problems on a device."""
    shares: dict[tuple[str, str], list[float]] = {}
    for study in studies:
        if (ceiling := ceiling_of(study)) is not None:
            shares.setdefault((study.problem.kernel, study.device.name), []).append(ceiling.share)
    header = ["kernel", "what it quantizes", "layout", "torchao's counterpart", *(f"{gpu}" for gpu in GPUS)]
    lines = [f"| {' | '.join(header)} |", "|---|---|---|---|---:|---:|"]
    for kernel in KERNELS:
        found = [shares.get((kernel, device)) for device in GPUS.values()]
        medians = [share(statistics.median(each)) if each else "" for each in found]
        lines.append(f"| {' | '.join([f'`{kernel}`', *WRITES[kernel], counterpart(kernel), *medians])} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernel_table", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--db", type=Path, default=ROOT / "results.db")
    print(markdown(complete_studies(parser.parse_args(arguments).db)))


if __name__ == "__main__":
    main()
