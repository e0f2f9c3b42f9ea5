"""Checks that run on every rank: processes of one machine on CPUs, or one GPU each.

python tests/distributed/ranks.py              # two processes, gloo
python tests/distributed/ranks.py --gpus 2     # NCCL
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fp8tune_kernels import interpreter

WAIT = timedelta(seconds=120)

Check = Callable[[Any, torch.device], None]
"""Gets the mesh of all ranks, one dim, and this rank's device; raises where a result is not one device's."""

Checks = Mapping[int, Collection[str]]
"""Number of ranks -> names of checks that so many run."""

SUM_DB = 45.0
"""Signal to noise at least, of a sum of two ranks' results beside one device's: partial sums are rounded to bfloat16.
Both are about 25 dB from the exact product."""


def sqnr(result: Tensor, reference: Tensor) -> float:
    """Decibels; infinite for equal bytes."""
    noise = (result.double() - reference.double()).square().mean()
    return float(10 * torch.log10(reference.double().square().mean() / noise))


def assert_placed(label: str, result: Tensor, reference: Tensor, placement: str, *, is_sum: bool) -> None:
    """A DTensor with this placement holds one device's bytes, or is near them where it is a sum over ranks."""
    assert isinstance(result, DTensor), label
    assert str(result.placements[0]).replace("P(sum)", "P") == placement.replace("P(sum)", "P"), label
    local = result.to_local()
    if local.dtype.itemsize == 1:  # gloo gathers no FP8
        local, reference = local.view(torch.uint8), reference.view(torch.uint8)
    mesh, placements = result.device_mesh, result.placements
    spread = DTensor.from_local(local, mesh, placements, shape=reference.shape, stride=reference.stride())
    whole = spread.full_tensor()
    assert whole.dtype == reference.dtype, label
    assert torch.equal(whole, reference) or (is_sum and sqnr(whole, reference) > SUM_DB), (
        label,
        sqnr(whole, reference),
    )


def assert_refused(says: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}"):
        function(*arguments, **options)


def _fork(_: int, names: Checks, folder: str, gpus: int, trace_after_s: float | None) -> None:
    """Ranks of one process that has imported what they need, which takes seconds each."""
    checks()
    interpreter.INTERPRETED = False  # which a fork of a process of tests has
    for ranks, these in names.items():
        arguments = functools.partial(together, these), ranks, folder, gpus >= ranks, trace_after_s
        torch.multiprocessing.start_processes(_main, arguments, nprocs=ranks, start_method="fork")


def checks() -> dict[str, Check]:
    """By name. FSDP takes seconds to import, and every worker collects the files of tests."""
    from expert_parallelism import experts_over_ranks
    from sharded_layers import compiled_layer, layers, refused_layers
    from sharded_products import compiled, operators, placements, refusals
    from sharded_training import experts_under_fsdp, layers_under_fsdp

    every = (operators, refusals, compiled, placements, layers, refused_layers, compiled_layer, experts_over_ranks)
    return {check.__name__: check for check in (*every, experts_under_fsdp, layers_under_fsdp)}


def together(names: Collection[str], mesh: Any, device: torch.device) -> dict[str, str]:
    """The traceback of each check that fails, "" of the others: ranks take seconds to start."""
    failures = {}
    for name in names:
        begin, failures[name] = time.monotonic(), ""
        try:
            checks()[name](mesh, device)
        except Exception:
            failures[name] = traceback.format_exc()
        print(f"{name} | {failures[name] or 'right'} | took {time.monotonic() - begin:.1f} s", flush=True)
    return failures


def _main(rank: int, check: Any, ranks: int, folder: str, is_gpu: bool, trace_after_s: float | None) -> None:
    if trace_after_s:
        faulthandler.dump_traceback_later(trace_after_s, repeat=True)
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if is_gpu else "gloo",
        init_method=f"file://{folder}/meeting of {ranks}",
        rank=rank,
        world_size=ranks,
        timeout=WAIT,
    )
    try:
        failures = check(init_device_mesh(device.type, (ranks,)), device)
        Path(folder, f"{ranks} {rank}.json").write_text(json.dumps(failures))
    finally:
        torch.distributed.destroy_process_group()


def on_ranks(
    names: Checks, *, gpus: int | None = None, trace_after_s: float | None = None
) -> dict[int, list[dict[str, str]]]:
    """Return the results of :func:`together` on each rank, by the number of ranks.

    They run on GPUs where ``gpus``, by default all, are as many. ``trace_after_s``: ranks print their stacks so often.
    On a CPU ranks run the references of the kernels, whatever the tests of this process run.
    """
    gpus = torch.cuda.device_count() if gpus is None else gpus
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    try:
        with tempfile.TemporaryDirectory() as folder:
            method = "spawn" if gpus else "fork"  # CUDA cannot be used in a fork
            arguments = names, folder, gpus, trace_after_s
            torch.multiprocessing.start_processes(_fork, arguments, nprocs=1, daemon=False, start_method=method)
            return {
                ranks: [json.loads(Path(folder, f"{ranks} {rank}.json").read_text()) for rank in range(ranks)]
                for ranks in names
            }
    finally:
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--check", choices=tuple(checks()), nargs="+", default=tuple(checks()))
    parser.add_argument("--trace-after", type=float, metavar="SECONDS", help="print so often what each rank is doing")
    options = parser.parse_args()
    on_ranks({options.gpus or 2: options.check}, gpus=options.gpus, trace_after_s=options.trace_after)


if __name__ == "__main__":
    main()
