"""Picks for the tests of the formats: a GEMM with three problems on a made-up H200."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from fp8tune.export.given import File, Given, Tuned
from fp8tune.records import Device, NamedInts, Problem
from fp8tune.replay.configs import encoded
from fp8tune.replay.recording import Config, Grid, Kernel, Launch, Tensor

H200 = Device("sm_90", "NVIDIA H200", torch="2.13.0", triton="3.6.0", driver="580.1", runtime="cuda 13.0")
SMALL = Config({"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32}, num_warps=4, num_stages=3)
LARGE = Config({"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64}, num_warps=8, num_stages=2)
EVEN = Config({"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64}, num_warps=4, num_stages=2)
GEMM = Kernel("maker.gemm:_matmul", key=("M", "N", "K"), configs=(SMALL, LARGE, EVEN))


def launch(*key: object) -> Launch:
    return Launch((Tensor("a", "bfloat16", (1,), (1,)),), Grid((), ()), key=(*key, "torch.bfloat16"))


def tuned(shape: NamedInts, pick: Config, times: dict[int, float], kernel: Kernel = GEMM, **fields) -> Tuned:
    """``times``: place among the kernel's configs -> microseconds."""
    times_us = {encoded(kernel, kernel.configs[place]): time_us for place, time_us in times.items()}
    config = encoded(kernel, pick)
    problem = Problem(kernel.name, shape, input_layout="recorded-0", fp8_dtype="", scale_mode="")
    one = Tuned(problem, shape, config, pick, times_us.get(config), times_us, f"winner on {shape}", "winner")
    slowdowns = {config: time_us / min(times_us.values()) for config, time_us in times_us.items()}
    recorded = launch(*(shape[name] for name in kernel.key if name in shape))
    return replace(one, **({"launch": recorded, "slowdowns": slowdowns} | fields))


def given(*all_tuned: Tuned, kernel: Kernel = GEMM, device: Device = H200, recorded: bool = True) -> Given:
    configs = {encoded(kernel, config): config for config in kernel.configs}
    return Given(kernel.name, device, all_tuned, configs, kernel if recorded else None)


def gemm(**changes) -> Given:
    return given(
        tuned(NamedInts(M=16, N=4096, K=4096), SMALL, {0: 10.0, 1: 20.0, 2: 11.0}),
        tuned(NamedInts(M=1024, N=4096, K=4096), LARGE, {0: 90.0, 1: 40.0, 2: 42.0}),
        tuned(NamedInts(M=1024, N=14336, K=4096), LARGE, {0: 300.0, 1: 120.0, 2: 130.0}),
        **changes,
    )


def documents(files: list[File]) -> dict[str, object]:
    """Path -> what the file holds."""
    return {str(file.path): json.loads(file.text) for file in files}


def written(files: list[File], folder: Path) -> list[Path]:
    """The files on disk, below a folder that none of them leaves."""
    paths = []
    for file in files:
        path = folder / file.path
        assert path.resolve().is_relative_to(folder.resolve())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)
        paths.append(path)
    return paths
