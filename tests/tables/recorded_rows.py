"""A recorded kernel in a database: its source, its configs, three problems with times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import database_rows as rows

from fp8tune.records import Device, KernelVersion, NamedInts, Problem, Status, Subject
from fp8tune.records import Kind as RowKind
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
ROWS = tuple(encoded(KERNEL, config) for config in CONFIGS)
TIMES = {1024: (10.0, 11.0, 10.1, 20.0, 20.0, 30.0), 4096: (30.0, 30.0, 20.2, 30.0, 20.0, 30.0), 8192: (60.0,) * 6}
"""n -> the time of each config."""


def problem(n: int, kernel: Kernel = KERNEL) -> Problem:
    layout = f"recorded-{launch(n).id}"
    return Problem(kernel.name, NamedInts(n=n), "none", layout, "bfloat16", fp8_dtype="", scale_mode="")


def launch(n: int) -> Launch:
    arguments = (Tensor("x", "bfloat16", (n,), (1,)), Scalar("n", n))
    return Launch(arguments, Grid(("BLOCK",), (((64,), (n // 64,)),)), (n, "torch.bfloat16"), config=CONFIGS[1])


def document(n: int, kernel: Kernel = KERNEL) -> str:
    return json.dumps({"kernel": as_json(replace(kernel, launches=())), "launch": as_json(launch(n))})


def version(kernel: Kernel = KERNEL) -> KernelVersion:
    declared = tuple(axes(kernel).items())
    return KernelVersion(kernel.name, "aaaa", encoded(kernel, kernel.configs[0]), declared, ("n",))


def sweep(
    store: Store,
    times: Mapping[int, tuple[float | None, ...]] = TIMES,
    device: Device = rows.H200,
    *,
    kernel: Kernel = KERNEL,
    wrong: Mapping[int, int] | None = None,
    complete: bool = True,
    check: str = "",
) -> None:
    """Store a sweep of all configs; wrong are those without a time. ``wrong``: n -> the place of another one."""
    id = rows.begin(store, device, f"request {device.name} {kernel.source_hash}")
    wrong = wrong or {}
    if check:
        store.record_check(id, version(kernel), check)
    store.record_launches({problem(n, kernel): document(n, kernel) for n in times})
    for n, of_configs in times.items():
        for place, time_us in enumerate(of_configs):
            is_wrong = time_us is None or wrong.get(n) == place
            row = rows.row(
                None if is_wrong else time_us,
                of=replace(problem(n, kernel), shape=NamedInts(n=n, M=1, K=1, G=1)),
                config=encoded(kernel, kernel.configs[place]),
                device=device,
                status=Status.WRONG if is_wrong else Status.OK,
                version=version(kernel),
            )
            store.add(id, replace(row, problem=problem(n, kernel), lookup_key=NamedInts(n=n), bytes_moved=4 * n))
        if complete:
            subject = Subject(version(kernel), device, RowKind.MEASURED, problem(n, kernel))
            store.mark_complete(id, subject, len(of_configs))
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


def package(folder: Path, source: str = SOURCE) -> Path:
    """The kernel's file in a package ``maker``."""
    file = folder / "maker" / "scales.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    (file.parent / "__init__.py").touch()
    file.write_text(source)
    return file
