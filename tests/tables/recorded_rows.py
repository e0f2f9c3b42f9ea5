"""A recorded kernel in a database: its source, its configs, three problems with times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import database_rows as rows

from fp8tune.records import Device, KernelVersion, Kind, NamedInts, Problem, Status, Subject
from fp8tune.replay.configs import axes, encoded
from fp8tune.replay.recording import Config, Grid, Kernel, Launch, Scalar, Tensor, as_json
from fp8tune.store.results import Store

NAME = "maker.scales:_kernel"
CONFIGS = tuple(
    Config({"BLOCK": block, "EVEN": even}, num_warps=warps, num_stages=2)
    for block in (64, 128, 256)
    for even, warps in ((True, 4), (False, 8))
)
KERNEL = Kernel(NAME, parameters=("x", "n", "BLOCK", "EVEN"), key=("n",), configs=CONFIGS, tuning_s=12.0)
TIMES = {1024: (10.0, 11.0, 10.1, 20.0, 20.0, 30.0), 4096: (30.0, 30.0, 20.2, 30.0, 20.0, 30.0), 8192: (60.0,) * 6}
"""n -> the time of each config."""


def launch(n: int) -> Launch:
    arguments = (Tensor("x", "bfloat16", (n,), (1,)), Scalar("n", n))
    return Launch(arguments, Grid(("BLOCK",), (((64,), (n // 64,)),)), (n, "torch.bfloat16"), config=CONFIGS[1])


def sweep(
    store: Store,
    times: Mapping[int, tuple[float, ...]] = TIMES,
    device: Device = rows.H200,
    *,
    kernel: Kernel = KERNEL,
    wrong: tuple[int, int] | None = None,
    complete: bool = True,
) -> None:
    """Store a sweep of all configs. ``wrong``: n, and the place of a config that is wrong there."""
    id = rows.begin(store, device, f"request {device.name} {kernel.source_hash}")
    configs, declared = [encoded(kernel, config) for config in kernel.configs], tuple(axes(kernel).items())
    version = KernelVersion(kernel.name, "aaaa", configs[0], declared, ("n",))
    for n, of_configs in times.items():
        layout = f"recorded-{launch(n).id}"
        problem = Problem(kernel.name, NamedInts(n=n), "none", layout, "bfloat16", fp8_dtype="", scale_mode="")
        document = {"kernel": as_json(replace(kernel, launches=())), "launch": as_json(launch(n))}
        store.record_launches({problem: json.dumps(document)})
        trials = []
        for place, (config, time_us) in enumerate(zip(configs, of_configs, strict=True)):
            is_wrong = wrong == (n, place)
            row = rows.row(
                None if is_wrong else time_us,
                size=replace(problem, shape=NamedInts(n=n, M=1, K=1, G=1)),
                config=config,
                device=device,
                status=Status.WRONG if is_wrong else Status.OK,
                version=version,
            )
            trials.append(replace(row, problem=problem, lookup_key=NamedInts(n=n), bytes_moved=4 * n))
        store.add_many(id, trials)
        if complete:
            store.mark_complete(id, Subject(version, device, Kind.MEASURED, problem), len(of_configs))
    store.finish_sweep(id)


SOURCE = '''\
"""Somebody's kernel."""

import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"BLOCK": block, "EVEN": even}, num_warps=warps, num_stages=2)
    for block in (64, 128, 256)
    for even, warps in ((True, 4), (False, 8))
]


@triton.autotune(
    configs=CONFIGS,
    key=["n"],  # the size
)
@triton.jit
def _kernel(x, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    pass
'''


def package(folder: Path) -> None:
    """Write the kernel's file in a package ``maker``."""
    (folder / "maker").mkdir(parents=True)
    (folder / "maker" / "__init__.py").touch()
    (folder / "maker" / "scales.py").write_text(SOURCE)
