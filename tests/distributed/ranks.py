"""What the tests of several ranks run on each: processes of one machine on CPUs, or one GPU each.

python tests/distributed/ranks.py              # two processes, gloo
python tests/distributed/ranks.py --gpus 2     # NCCL
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

WAIT = timedelta(seconds=120)

Check = Callable[[Any, torch.device], dict[str, Any]]
"""Gets the mesh of all ranks, one dim, and this rank's device; returns what it found."""


def sqnr(result: Tensor, reference: Tensor) -> float:
    """Decibels; infinite for equal bytes."""
    noise = (result.double() - reference.double()).square().mean()
    return float(10 * torch.log10(reference.double().square().mean() / noise))


def are_bytes(result: Tensor, reference: Tensor) -> bool:
    return result.dtype == reference.dtype and torch.equal(result, reference)


def _fork(_: int, *arguments: Any) -> None:
    """Ranks of one process that has imported what they need, which takes seconds each."""
    ranks = arguments[1]
    torch.multiprocessing.start_processes(_main, arguments, nprocs=ranks, start_method="fork")


def _main(rank: int, check: Check, ranks: int, folder: str, is_gpu: bool, trace_after_s: float | None) -> None:
    if trace_after_s:
        faulthandler.dump_traceback_later(trace_after_s, repeat=True)
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if is_gpu else "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks, timeout=WAIT
    )
    try:
        found = check(init_device_mesh(device.type, (ranks,)), device)
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
    finally:
        torch.distributed.destroy_process_group()


def on_ranks(
    check: Check, ranks: int = 2, *, is_gpu: bool | None = None, trace_after_s: float | None = None
) -> list[dict[str, Any]]:
    """What a function of a module found on each rank. A rank's exception is raised here, with its traceback.

    ``is_gpu`` None: on GPUs where there are as many. ``trace_after_s``: ranks print their stacks so often.
    On a CPU ranks run the references of the kernels, whatever the tests of this process run.
    """
    is_gpu = torch.cuda.device_count() >= ranks if is_gpu is None else is_gpu
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    try:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_fork, (check, ranks, folder, is_gpu, trace_after_s), nprocs=1, daemon=False)
            return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    finally:
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted


def main() -> None:
    from distributed_checks import CHECKS, together

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--check", choices=tuple(CHECKS), nargs="+", default=tuple(CHECKS))
    parser.add_argument("--trace-after", type=float, metavar="SECONDS", help="print so often what each rank is doing")
    options = parser.parse_args()
    check = functools.partial(together, options.check)
    on_ranks(check, options.gpus or 2, is_gpu=options.gpus > 0, trace_after_s=options.trace_after)


if __name__ == "__main__":
    main()
